// D = epilogue(A * B) by mma.sync, for sm_80 and everything after it. See README.md.
//
// A block computes one kTileM x kTileN tile over one range of K; each warp a kWarpM x kWarpN part
// of it in registers. All warps play both roles:
//   producer  copies tile t + kStages - 1 while tile t is multiplied: by TMA where it exists and can, else
//             by cp.async (mainloop.cuh)
//   consumer  fragments of k-step i + 1 are loaded while those of step i are multiplied
// One __syncthreads a tile, before the last k-step: it publishes tile t + 1 (whose group each
// thread has waited for) and frees the stage of tile t, all of whose fragments are in registers.
//
// Shared memory, in bytes:
//   [0, kStagesBytes)            stages, each A's tile and then B's (operand_tile.cuh)
//   the same bytes afterwards    for each warp 16 x (kWarpN + padding) partial sums
//   [kStagesBytes, kSharedBytes) an mbarrier for each stage, for copies by TMA
#pragma once

#include <cstdint>

#include "kernels/mma_sync/mainloop.cuh"
#include "kernels/mma_sync/params.cuh"
#include "kernels/mma_sync/store.cuh"
#include "ptx/special_registers.cuh"

namespace tcgemm::mma {

// The block's work, for its stores. Of a symmetric D it is worked out anew: kept across the main loop it would take a
// register that 8-bit operands need which are not K-major.
template <typename Config, typename Epilogue>
__device__ __forceinline__ Work stored_work(const Params& params, const Epilogue& epilogue, const Work& work) {
  if constexpr (SymmetryOf<Epilogue>::kIsSymmetric) return Work::make<Config>(params, epilogue, ptx::ctaid_x());
  return work;
}

template <typename Config, typename Mma, typename Operands, typename Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocksPerSm)
    gemm_kernel(const __grid_constant__ Params params, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  using Traits = mma::Traits<Config, Mma, Operands>;
  using A = typename Traits::A;
  using B = typename Traits::B;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t a_address = ptx::shared_base_address(shared_memory);
  const uint32_t b_address = a_address + A::kBytes;

  const int warp = threadIdx.x / 32;
  const int warp_m = warp % Config::kWarpsM * Config::kWarpM;
  const int warp_n = warp / Config::kWarpsM * Config::kWarpN;
  const Work work = Work::make<Config>(params, epilogue, blockIdx.x);
  Mainloop<Traits> loop;
  loop.a_address = a_address + A::lane_offset(warp_m);
  loop.b_address = b_address + B::lane_offset(warp_n);
  if (work.k > 0) {
    const int num_tiles = work.num_k_tiles(Traits::kTileK);
    const bool is_aligned = params.a_granularity == kChunkBytes && params.b_granularity == kChunkBytes;
    constexpr bool kHasTensorCopies = __CUDA_ARCH__ >= 900 && Traits::kIsTensorLayout;
    if (kHasTensorCopies && is_aligned) {
      if constexpr (kHasTensorCopies) {
        loop.run(TensorCopies<Traits>(params, work, a_address), num_tiles);
      }
    } else {
      const auto a_source =
          A::make_source(params.a.at_batch(work.batch_idx), params.a.ld, work.m_idx, work.k_begin, params.m, a_address);
      const auto b_source =
          B::make_source(params.b.at_batch(work.batch_idx), params.b.ld, work.n_idx, work.k_begin, params.n, b_address);
      if (is_aligned) {
        loop.run(AlignedCopies<Traits>(a_source, b_source, num_tiles, work.k), num_tiles);
      } else {
        loop.run(UnalignedCopies<Traits>{{}, a_source, b_source, params.a_granularity, params.b_granularity, work.k},
                 num_tiles);
      }
    }
  }
  const Work stored = stored_work<Config>(params, epilogue, work);
  store_tile<Traits>(params, epilogue, loop.accumulators, a_address + warp * Traits::kStagingBytesPerWarp,
                     {stored.split_idx, stored.batch_idx, stored.m_idx + warp_m, stored.n_idx + warp_n});
#else
  __trap();  // cp.async and these mma shapes begin with sm_80.
#endif
}

}  // namespace tcgemm::mma
