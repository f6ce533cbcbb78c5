// One launch of a grouped product.
#include "kernels/mma_sync/ragged_launch.h"

#include <algorithm>
#include <cstdint>

#include "kernels/common/float_type.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/mma_sync/ragged_params.cuh"

namespace tcgemm::mma {
namespace {

// The operands as those of a batched product, so that launch.cc's rules on alignment hold.
Problem batched_problem(const RaggedProblem& p) {
  Problem batched{};
  batched.batch = batched.batch_inner = std::max<int64_t>(p.groups, 1);
  batched.m = p.m;
  batched.n = p.n;
  batched.k = p.k;
  batched.a = {p.in, !p.is_rows(), p.is_rows() ? p.k : p.m, 0, 0};
  batched.b = {p.in, p.b_transposed, p.b_transposed ? p.k : p.n, 0, p.is_rows() ? p.k * p.n : 0};
  return batched;
}

}  // namespace

Status launch_ragged(const RaggedCall& call) {
  const RaggedProblem& p = *call.problem;
  const RaggedBuffers& buffers = call.buffers;
  const Tile& tile = call.geometry.tile;
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
  gemm.out = float_type(p.out);
  gemm.stores_vectors =
      (reinterpret_cast<uintptr_t>(buffers.d) | static_cast<uintptr_t>(p.n * dtype_bytes(p.out))) % 16 == 0;
  params.groups = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                   static_cast<int32_t>(p.groups), static_cast<int32_t>(p.tokens())};
  return launch_blocks("mma_sync grouped kernel", *call.kernel, max_ragged_tiles(p, tile.m, tile.n), tile.threads(),
                       call.geometry.shared_bytes(), call.stream, params);
}

}  // namespace tcgemm::mma
