// D[b,m,n] = epilogue(sum_k op(A)[b,m,k] * op(B)[b,k,n]) on CUDA cores, one thread an element.
//
// The first rung of the ladder: no shared memory, no reuse but what the caches give. Any layout,
// any alignment, any strides. Neighboring threads of a warp take neighboring columns, so B (not
// transposed) and D are coalesced and A is broadcast.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "kernels/simt/config.h"
#include "tile/gemm_args.cuh"
#include "tile/multiply_add.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::simt {

template <typename In, typename Acc, typename Outputs>
__global__ void __launch_bounds__(NaiveConfig::kThreads)
    naive_kernel(const __grid_constant__ GemmArgs<In, Outputs> args) {
  const TileCoord tile = args.grid.at(blockIdx.x);
  const int64_t m_idx = tile.tile_m_idx * NaiveConfig::kTileM + threadIdx.x / NaiveConfig::kTileN;
  const int64_t n_idx = tile.tile_n_idx * NaiveConfig::kTileN + threadIdx.x % NaiveConfig::kTileN;
  if (m_idx >= args.m || n_idx >= args.n) return;

  const int64_t a_step = args.a_transposed ? args.a.ld : 1;
  const int64_t b_step = args.b_transposed ? 1 : args.b.ld;
  const In* a = args.a.at_batch(tile.batch_idx) + m_idx * (args.a_transposed ? 1 : args.a.ld);
  const In* b = args.b.at_batch(tile.batch_idx) + n_idx * (args.b_transposed ? args.b.ld : 1);
  Acc acc[1] = {};
  for (int k_idx = 0; k_idx < args.k; ++k_idx) {
    tile::multiply_add(acc[0], convert<Acc>(*a), convert<Acc>(*b));
    a += a_step;
    b += b_step;
  }
  args.outputs.visit([&](const auto& output) { output.store(acc, tile.batch_idx, m_idx, n_idx); });
}

}  // namespace tcgemm::simt
