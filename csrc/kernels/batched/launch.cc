// One launch of the kernel for batches of tiny matrices.
#include "kernels/batched/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/extent.h"
#include "kernels/batched/params.cuh"
#include "kernels/common/alignment.h"
#include "kernels/common/launch_blocks.h"

namespace tcgemm::batched {
namespace {

// Blocks that run at once. Of an SM's shared memory a block may have all but 1 KB, and each takes 1 KB more than it
// asks for.
int64_t resident_blocks(const Device& device, const Tiling& tiling) {
  const int64_t fitting = (device.shared_memory_bytes + 1024) / (tiling.shared_bytes() + 1024);
  return device.num_sms * std::max<int64_t>(std::min<int64_t>(fitting, tiling.blocks), 1);
}

}  // namespace

Status launch(const Problem& p, const Buffers& buffers, const Device& device, const Tiling& tiling,
              const Kernel& kernel, cudaStream_t stream) {
  for (const void* array : {buffers.a, buffers.b, static_cast<const void*>(buffers.d)}) {
    if (!is_aligned(array, kChunk)) return Status::invalid("arrays must begin on 16 bytes");
  }
  // All blocks get as many groups, as large as that needs: of groups of the largest size some would get one more.
  const int64_t blocks = resident_blocks(device, tiling);
  const int64_t rounds = tcgemm::ceil_div(p.batch, blocks * tiling.matrices);
  const int64_t needed = tcgemm::ceil_div(p.batch, blocks * rounds);
  Params params{};
  params.a = buffers.a;
  params.b = buffers.b;
  params.d = buffers.d;
  params.batch = static_cast<int32_t>(p.batch);
  params.matrices = static_cast<int32_t>(tcgemm::ceil_div(needed, tiling.alignment()) * tiling.alignment());
  params.num_groups = static_cast<int32_t>(tcgemm::ceil_div(p.batch, params.matrices));
  return launch_blocks("simt_batched", kernel, std::min<int64_t>(params.num_groups, blocks), kThreads,
                       tiling.shared_bytes(), stream, params);
}

}  // namespace tcgemm::batched
