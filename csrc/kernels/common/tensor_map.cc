#include "kernels/common/tensor_map.h"

#include <algorithm>
#include <string>

#include "core/driver.h"

namespace tcgemm {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const auto function = find_driver_function<EncodeTiled>("cuTensorMapEncodeTiled", 12000);
  return function;
}

}  // namespace

Status encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* data,
                         const cuuint64_t* extents, const cuuint64_t* stride_bytes, const cuuint32_t* box,
                         CUtensorMapSwizzle swizzle) {
  const EncodeTiled function = encode_tiled();
  if (function == nullptr) return Status::internal("the driver has no cuTensorMapEncodeTiled");
  const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
  const CUresult result = function(map, type, rank, const_cast<void*>(data), extents, stride_bytes, box,
                                   element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::ok();
  return Status::internal("cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result));
}

Status encode_operand_map(CUtensorMap* map, CUtensorMapDataType type, const TensorOperand& operand, const int (&box)[2],
                          CUtensorMapSwizzle swizzle) {
  const auto extent = [](int64_t count) { return static_cast<cuuint64_t>(std::max<int64_t>(count, 1)); };
  const auto stride = [](int64_t bytes) { return static_cast<cuuint64_t>(std::max<int64_t>(bytes, 16)); };
  const cuuint64_t extents[] = {extent(operand.contiguous), extent(operand.rows),
                                operand.inner_bytes == 0 ? 1 : extent(operand.inner),
                                operand.outer_bytes == 0 ? 1 : extent(operand.outer)};
  const cuuint64_t strides[] = {stride(operand.row_bytes), stride(operand.inner_bytes), stride(operand.outer_bytes)};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]), 1, 1};
  return encode_tensor_map(map, type, 4, operand.data, extents, strides, box_extents, swizzle);
}

}  // namespace tcgemm
