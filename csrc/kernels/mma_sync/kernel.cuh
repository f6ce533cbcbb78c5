// D = epilogue(A * B) by mma.sync, for sm_80 and everything after it. See README.md.
//
// A block computes one kTileM x kTileN tile over one range of K; each warp a kWarpM x kWarpN part
// of it in registers. All warps play both roles:
//   producer  cp.async of tile t + kStages - 1 while tile t is multiplied; one group a tile
//   consumer  fragments of k-step i + 1 are loaded while those of step i are multiplied
// One __syncthreads a tile, before the last k-step: it publishes tile t + 1 (whose group each
// thread has waited for) and frees the stage of tile t, all of whose fragments are in registers.
//
// Shared memory, in bytes:
//   [0, kStages * kStageBytes)   stages, each A's tile and then B's (operand_tile.cuh)
//   the same bytes afterwards    for each warp 16 x (kWarpN + padding) partial sums
#pragma once

#include <cstdint>

#include "kernels/mma_sync/epilogues.cuh"
#include "kernels/mma_sync/mainloop.cuh"
#include "kernels/mma_sync/params.cuh"
#include "kernels/mma_sync/store.cuh"

namespace tcgemm::mma {

template <typename Config, typename Instruction, typename Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocksPerSm)
    gemm_kernel(const __grid_constant__ Params params, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  using Traits = KernelTraits<Config, Instruction>;
  using A = typename Traits::A;
  using B = typename Traits::B;
  using Partial = typename Instruction::Partial;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t a_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const uint32_t b_address = a_address + A::kBytes;

  const int64_t num_tiles = params.grid.num_tiles();
  // 32 bits hold each of these (the last two unsigned), and they stay in registers through the mainloop.
  const int split_idx = static_cast<int>(blockIdx.x / num_tiles);
  const TileCoord tile = params.grid.at(blockIdx.x - split_idx * num_tiles);
  const int batch_idx = static_cast<int>(tile.batch_idx);
  const uint32_t tile_m = static_cast<uint32_t>(tile.tile_m_idx) * Config::kTileM;
  const uint32_t tile_n = static_cast<uint32_t>(tile.tile_n_idx) * Config::kTileN;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp % Config::kWarpsM * Config::kWarpM;
  const int warp_n = warp / Config::kWarpsM * Config::kWarpN;

  Mainloop<Config, Instruction> loop;
  // The last splits may have nothing left: they write zeros.
  const int64_t k_begin = static_cast<int64_t>(split_idx) * params.k_per_split;
  const int64_t k_left = params.k - k_begin;
  const int k = static_cast<int>(k_left < params.k_per_split ? (k_left > 0 ? k_left : 0) : params.k_per_split);
  if (k > 0) {
    const int num_tiles = static_cast<int>((int64_t{k} + Traits::kTileK - 1) / Traits::kTileK);
    const auto a_source =
        A::make_source(params.a.at_batch(batch_idx), params.a.ld, tile_m, k_begin, params.m, a_address);
    const auto b_source =
        B::make_source(params.b.at_batch(batch_idx), params.b.ld, tile_n, k_begin, params.n, b_address);
    loop.a_address = a_address + A::lane_offset(warp_m);
    loop.b_address = b_address + B::lane_offset(warp_n);
    if (params.a_granularity == kChunkBytes && params.b_granularity == kChunkBytes) {
      loop.run(AlignedCopies<Config, Instruction>(a_source, b_source, num_tiles, k), num_tiles);
    } else {
      loop.run(UnalignedCopies<Config, Instruction>{a_source, b_source, params.a_granularity, params.b_granularity, k},
               num_tiles);
    }
  }
  store_tile<Config, Instruction>(params, epilogue, loop.accumulators,
                                  reinterpret_cast<Partial*>(shared_memory + warp * Traits::kStagingBytesPerWarp),
                                  {split_idx, batch_idx, tile_m + warp_m, tile_n + warp_n});
#else
  __trap();  // cp.async and these mma shapes begin with sm_80.
#endif
}

}  // namespace tcgemm::mma
