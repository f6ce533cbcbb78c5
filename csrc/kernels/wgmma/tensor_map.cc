// Tensor maps of one launch.
#include "kernels/common/tensor_map.h"

#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {
namespace {

CUtensorMapDataType input_type(DType dtype) {
  if (dtype == DType::kBF16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::kF16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (dtype_bytes(dtype) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  // Rounds float32 to TF32 while loading; the tensor core itself would truncate.
  return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
}

CUtensorMapDataType output_type(FloatType type) {
  return type == FloatType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : type == FloatType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

}  // namespace

Status encode_operand_map(CUtensorMap* map, const AlignedOperand& operand, const OperandShape& shape,
                          const OperandExtents& extents, Box box) {
  const bool is_k_major = shape.is_k_major();
  const TensorOperand tensor{operand.data,
                             is_k_major ? extents.k : extents.along,
                             is_k_major ? extents.along : extents.k,
                             extents.inner,
                             extents.outer,
                             operand.ld * shape.element_bytes,
                             operand.inner_stride * shape.element_bytes,
                             operand.outer_stride * shape.element_bytes};
  return tcgemm::encode_operand_map(map, input_type(operand.dtype), tensor, {box.contiguous, box.rows},
                                    CU_TENSOR_MAP_SWIZZLE_128B);
}

Status encode_output_map(CUtensorMap* map, const OutputMatrices& d, const StoreBox& box) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(d.columns), static_cast<cuuint64_t>(d.rows),
                                static_cast<cuuint64_t>(d.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(d.row_bytes()),
                                static_cast<cuuint64_t>(d.rows * d.row_bytes())};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1};
  const CUtensorMapSwizzle swizzle = box.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tensor_map(map, output_type(d.type), 3, d.data, extents, strides, box_extents, swizzle);
}

}  // namespace tcgemm::wgmma_family
