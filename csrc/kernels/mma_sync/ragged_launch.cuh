// Definition of launch_ragged(); included by ragged_instances.cu only.
#pragma once

#include "kernels/mma_sync/launch.cuh"
#include "kernels/mma_sync/ragged_kernel.cuh"
#include "kernels/mma_sync/ragged_launch.h"

namespace tcgemm::mma {

// The operands as those of a batched product, so that launch.cuh's rules on alignment hold.
inline Problem batched_problem(const RaggedProblem& p) {
  Problem batched{};
  batched.batch = batched.batch_inner = std::max<int64_t>(p.groups, 1);
  batched.m = p.m;
  batched.n = p.n;
  batched.k = p.k;
  batched.a = {p.in, !p.is_rows(), p.is_rows() ? p.k : p.m, 0, 0};
  batched.b = {p.in, p.b_transposed, p.b_transposed ? p.k : p.n, 0, p.is_rows() ? p.k * p.n : 0};
  return batched;
}

template <typename Config, typename Instruction>
Status launch_ragged_kernel(const RaggedParams& params, uint32_t num_blocks, cudaStream_t stream) {
  return launch_blocks("mma_sync grouped kernel", ragged_kernel<Config, Instruction>, num_blocks, Config::kThreads,
                       Config::kSharedBytes, stream, params);
}

template <typename Instruction>
Status launch_ragged(const RaggedProblem& p, const RaggedBuffers& buffers, cudaStream_t stream) {
  const Problem batched = batched_problem(p);
  RaggedParams params{};
  Params& gemm = params.gemm;
  gemm.a = in_bytes(batched, batched.a, buffers.a, p.tokens(), p.is_rows() ? p.k : p.m, &gemm.a_granularity);
  gemm.b = in_bytes(batched, batched.b, buffers.b, p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n,
                    &gemm.b_granularity);
  gemm.batch = 1;
  gemm.m = p.m;
  gemm.n = p.n;
  gemm.k = p.k;
  gemm.d = buffers.d;
  gemm.out = epilogue::float_type(p.out);
  gemm.stores_vectors =
      (reinterpret_cast<uintptr_t>(buffers.d) | static_cast<uintptr_t>(p.n * dtype_bytes(p.out))) % 16 == 0;
  params.groups = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                   static_cast<int32_t>(p.groups), static_cast<int32_t>(p.tokens())};
  const uint32_t num_blocks = static_cast<uint32_t>(max_ragged_tiles(p, RaggedTile::kTileM, RaggedTile::kTileN));
  if (!p.is_rows())
    return launch_ragged_kernel<Config<RaggedTile, true, false>, Instruction>(params, num_blocks, stream);
  return p.b_transposed
             ? launch_ragged_kernel<Config<RaggedTile, false, true>, Instruction>(params, num_blocks, stream)
             : launch_ragged_kernel<Config<RaggedTile, false, false>, Instruction>(params, num_blocks, stream);
}

}  // namespace tcgemm::mma
