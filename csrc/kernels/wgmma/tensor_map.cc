// Tensor maps of one launch.
#include "tile/tensor_map.h"

#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {

Status encode_operand_map(CUtensorMap* map, CUtensorMapDataType type, const Call& call, const AlignedOperand& operand,
                          OperandExtent extent, const int (&box)[2]) {
  const int64_t bytes = call.element_bytes;
  const TensorOperand tensor{operand.data,
                             extent.contiguous,
                             extent.rows,
                             call.batch_inner,
                             call.batch / call.batch_inner,
                             operand.ld * bytes,
                             operand.inner_stride * bytes,
                             operand.outer_stride * bytes};
  return tcgemm::encode_operand_map(map, type, tensor, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

Status encode_output_map(CUtensorMap* map, const Call& call, bool swapped, OutputBox box) {
  const int64_t columns = swapped ? call.m : call.n, rows = swapped ? call.n : call.m;
  const int64_t out_bytes = call.out_type == FloatType::kF32 ? 4 : 2;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(call.batch * call.num_splits)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns * out_bytes),
                                static_cast<cuuint64_t>(rows * columns * out_bytes)};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1};
  const CUtensorMapDataType type = call.out_type == FloatType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : call.out_type == FloatType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUtensorMapSwizzle swizzle = box.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tensor_map(map, type, 3, call.d, extents, strides, box_extents, swizzle);
}

}  // namespace tcgemm::wgmma_family
