// Tensor maps of one launch.
#include "kernels/common/tensor_map.h"

#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {
namespace {

CUtensorMapDataType input_type(DType dtype) {
  if (dtype == DType::kBF16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::kF16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // Rounds float32 to TF32 while loading; the tensor core itself would truncate.
  return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
}

CUtensorMapDataType output_type(FloatType type) {
  return type == FloatType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : type == FloatType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

}  // namespace

Status encode_operand_map(CUtensorMap* map, const Call& call, const AlignedOperand& operand, OperandExtent extent,
                          Box box) {
  const int64_t bytes = dtype_bytes(operand.dtype);
  const TensorOperand tensor{operand.data,
                             extent.contiguous,
                             extent.rows,
                             call.batch_inner,
                             call.batch / call.batch_inner,
                             operand.ld * bytes,
                             operand.inner_stride * bytes,
                             operand.outer_stride * bytes};
  return tcgemm::encode_operand_map(map, input_type(operand.dtype), tensor, {box.contiguous, box.rows},
                                    CU_TENSOR_MAP_SWIZZLE_128B);
}

Status encode_output_map(CUtensorMap* map, const Call& call, int tile_n) {
  const bool swapped = call.geometry.shape.swapped;
  const int64_t columns = swapped ? call.m : call.n, rows = swapped ? call.n : call.m;
  const int out_bytes = call.out_type == FloatType::kF32 ? 4 : 2;
  const StoreBox box = StoreBox::make(swapped, tile_n, out_bytes);
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(call.batch * call.num_splits)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns * out_bytes),
                                static_cast<cuuint64_t>(rows * columns * out_bytes)};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1};
  const CUtensorMapSwizzle swizzle = box.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tensor_map(map, output_type(call.out_type), 3, call.d, extents, strides, box_extents, swizzle);
}

Status encode_fused_map(CUtensorMap* map, const Call& call, const void* data, int64_t halves) {
  const int64_t out_bytes = call.out_type == FloatType::kF32 ? 4 : 2, row_bytes = call.n * out_bytes;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(call.n), static_cast<cuuint64_t>(halves),
                                static_cast<cuuint64_t>(call.m), static_cast<cuuint64_t>(call.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(halves * row_bytes),
                                static_cast<cuuint64_t>(call.m * halves * row_bytes)};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(128 / out_bytes), 1, 64, 1};
  return encode_tensor_map(map, output_type(call.out_type), 4, data, extents, strides, box_extents,
                           CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace tcgemm::wgmma_family
