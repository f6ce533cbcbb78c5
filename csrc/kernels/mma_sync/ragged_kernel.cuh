// Grouped products by mma.sync (core/ragged_problem.h), for sm_80 and later and for operands of any alignment. The grid
// has as many CTAs as any group sizes need; each CTA locates its tile from the group sizes, and surplus CTAs return. To
// the main loop and the store, which are those of kernel.cuh, a tile's group is a GEMM with bounds of its own, so that
// nothing outside the group is read.
//
//   rows         grouped along M: A is the tokens, whose rows end with the group; B is the group's weights
//   contraction  grouped along K: both operands hold tokens in rows of K, which begins and ends with the group
#pragma once

#include <cstdint>

#include "kernels/mma_sync/mainloop.cuh"
#include "kernels/mma_sync/ragged_params.cuh"
#include "kernels/mma_sync/store.cuh"
#include "tile/segment_walk.cuh"

namespace tcgemm::mma {

// Number of CTA tiles of a segment. In the form rows, m counts from the segment's first token.
template <typename Traits>
struct RaggedTiles {
  using Config = typename Traits::Config;
  static constexpr bool kIsRows = Traits::A::kKMajor;  // A contraction loads tokens along K, with M contiguous.
  int32_t tiles_m, tiles_n;                            // tiles_m is of a contraction's D; tokens decide it in rows.

  __device__ __forceinline__ int32_t num_tiles(bool is_group, int32_t tokens) const {
    return kIsRows ? num_tiles_m(tokens) * tiles_n : is_group ? tiles_m * tiles_n : 0;
  }
  __device__ __forceinline__ int32_t num_tiles_m(int32_t tokens) const {
    return kIsRows ? (tokens + Config::kTileM - 1) / Config::kTileM : tiles_m;
  }
};

// Finds the tile of this CTA: the first warp searches, and all threads read the result from shared memory. Sets k to -1
// where the CTA has no tile. Rows that belong to no group are a segment with group -1, whose k is 0: zeros are stored.
template <typename Traits>
__device__ __forceinline__ void find_work(const RaggedParams& params, Work* work, int64_t* m_end) {
  using Config = typename Traits::Config;
  using Tiles = RaggedTiles<Traits>;
  __shared__ Segment shared_segment;
  __shared__ int32_t shared_tile;
  const auto tiles_of = [](int64_t extent, int tile) { return static_cast<int32_t>((extent + tile - 1) / tile); };
  const Tiles tiles{tiles_of(params.gemm.m, Config::kTileM), tiles_of(params.gemm.n, Config::kTileN)};
  if (threadIdx.x < 32) {
    Segment segment;
    int32_t tile;
    SegmentWalk<Tiles> walk(params.groups, tiles);
    if (!walk.find(blockIdx.x, &segment, &tile)) tile = -1;
    if (threadIdx.x == 0) {
      shared_segment = segment;
      shared_tile = tile;
    }
  }
  __syncthreads();
  const Segment segment = shared_segment;
  if (shared_tile < 0) {
    work->k = -1;
    return;
  }
  const int32_t tokens = segment.token_end - segment.token_begin;
  const SerpentineTile coord = SerpentineTile::make(shared_tile, tiles.num_tiles_m(tokens), tiles.tiles_n);
  work->split_idx = 0;
  work->batch_idx = max(segment.group, 0);
  work->m_idx = (Tiles::kIsRows ? segment.token_begin : 0) + coord.row * Config::kTileM;
  work->n_idx = coord.column * Config::kTileN;
  work->k_begin = Tiles::kIsRows ? 0 : segment.token_begin;
  work->k = !Tiles::kIsRows ? tokens : segment.group < 0 ? 0 : static_cast<int>(params.gemm.k);
  *m_end = Tiles::kIsRows ? segment.token_end : params.gemm.m;
}

template <typename Config, typename Mma, typename Operands>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocksPerSm)
    ragged_kernel(const __grid_constant__ RaggedParams params) {
#if __CUDA_ARCH__ >= 800
  using Traits = mma::Traits<Config, Mma, Operands>;
  using A = typename Traits::A;
  using B = typename Traits::B;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t a_address = ptx::shared_base_address(shared_memory);
  const uint32_t b_address = a_address + A::kBytes;

  Work work;
  int64_t m_end;
  find_work<Traits>(params, &work, &m_end);
  if (work.k < 0) return;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp % Config::kWarpsM * Config::kWarpM;
  const int warp_n = warp / Config::kWarpsM * Config::kWarpN;
  Mainloop<Traits> loop;
  loop.a_address = a_address + A::lane_offset(warp_m);
  loop.b_address = b_address + B::lane_offset(warp_n);
  const Params& gemm = params.gemm;
  if (work.k > 0) {
    const int num_k_tiles = work.num_k_tiles(Traits::kTileK);
    const auto a_source = A::make_source(gemm.a.data, gemm.a.ld, work.m_idx, work.k_begin, m_end, a_address);
    const auto b_source =
        B::make_source(gemm.b.at_batch(work.batch_idx), gemm.b.ld, work.n_idx, work.k_begin, gemm.n, b_address);
    if (gemm.a_granularity == kChunkBytes && gemm.b_granularity == kChunkBytes) {
      loop.run(AlignedCopies<Traits>(a_source, b_source, num_k_tiles, work.k), num_k_tiles);
    } else {
      loop.run(UnalignedCopies<Traits>{{}, a_source, b_source, gemm.a_granularity, gemm.b_granularity, work.k},
               num_k_tiles);
    }
  }
  // In the form rows, all groups share one D: the store ends with the group's last row.
  Params store_params = gemm;
  store_params.m = m_end;
  store_tile<Traits>(store_params, Bare{}, loop.accumulators, a_address + warp * Traits::kStagingBytesPerWarp,
                     {0, RaggedTiles<Traits>::kIsRows ? 0 : work.batch_idx, work.m_idx + warp_m, work.n_idx + warp_n});
#else
  __trap();  // cp.async and these mma shapes begin with sm_80.
#endif
}

}  // namespace tcgemm::mma
