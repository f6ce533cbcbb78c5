// Host side of the simt kernels, from a problem to an instantiation. Included by the files that instantiate.
#pragma once

#include "epilogue/epilogue.cuh"
#include "kernels/common/gemm_args.h"
#include "kernels/common/launch.cuh"
#include "kernels/simt/launch.h"
#include "kernels/simt/naive_kernel.cuh"
#include "kernels/simt/tiled_kernel.cuh"

namespace tcgemm::simt {

template <typename In, typename Acc, typename Outputs>
Status launch_naive(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  const auto args = make_gemm_args<In, Outputs>(p, buffers, NaiveConfig::kTileM, NaiveConfig::kTileN, 16, 16);
  return launch_blocks("simt_naive", naive_kernel<In, Acc, Outputs>, args.grid.num_tiles(), NaiveConfig::kThreads, 0,
                       stream, args);
}

template <typename Tile, typename T, typename Outputs>
Status launch_tiled(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  const auto args = make_gemm_args<T, Outputs>(p, buffers, Tile::kTileM, Tile::kTileN, 16, 16);
  return visit_layouts(p, [&](auto ta, auto tb) {
    return launch_blocks("simt_tiled", tiled_kernel<TiledConfig<Tile, ta, tb>, T, Outputs>, args.grid.num_tiles(),
                         Tile::kThreads, 0, stream, args);
  });
}

inline bool is_identity(const Problem& p) { return p.alpha == 1.0 && p.beta == 0.0; }

}  // namespace tcgemm::simt
