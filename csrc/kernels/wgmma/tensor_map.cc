// Tensor maps for TMA, encoded anew for each launch: they hold addresses, and XLA moves buffers.
#include <algorithm>
#include <string>

#include "core/cuda_status.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, reached through the runtime so that libcuda is never linked.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found)
                                                                         : nullptr;
  }();
  return function;
}

Status encode(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* data, const cuuint64_t* extents,
              const cuuint64_t* stride_bytes, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  const EncodeTiled function = encode_tiled();
  if (function == nullptr) return Status::internal("the driver has no cuTensorMapEncodeTiled");
  const cuuint32_t element_strides[] = {1, 1, 1, 1};
  const CUresult result = function(map, type, rank, const_cast<void*>(data), extents, stride_bytes, box,
                                   element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::ok();
  return Status::internal("cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result));
}

}  // namespace

Status encode_operand_map(CUtensorMap* map, CUtensorMapDataType type, const Call& call, const AlignedOperand& operand,
                          OperandExtent extent, const int (&box)[2]) {
  // An extent of 0 (K = 0) is encoded as 1: the kernel asks for coordinates past it only, which
  // read as zero without touching memory. A broadcast level has extent 1.
  const auto levels = [](int64_t count, int64_t stride) { return static_cast<cuuint64_t>(stride == 0 ? 1 : count); };
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(std::max<int64_t>(extent.contiguous, 1)),
                                static_cast<cuuint64_t>(std::max<int64_t>(extent.rows, 1)),
                                levels(call.batch_inner, operand.inner_stride),
                                levels(call.batch / call.batch_inner, operand.outer_stride)};
  const auto bytes = [&](int64_t stride) {
    return static_cast<cuuint64_t>(std::max<int64_t>(stride * call.element_bytes, 16));
  };
  const cuuint64_t strides[] = {bytes(operand.ld), bytes(operand.inner_stride), bytes(operand.outer_stride)};
  const cuuint32_t box_extents[] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]), 1, 1};
  return encode(map, type, 4, operand.data, extents, strides, box_extents, CU_TENSOR_MAP_SWIZZLE_128B);
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
  return encode(map, type, 3, call.d, extents, strides, box_extents, swizzle);
}

}  // namespace tcgemm::wgmma_family
