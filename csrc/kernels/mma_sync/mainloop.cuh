// The mainloop of a block: cp.async pipeline, fragment double buffer, mma.sync.
#pragma once

#include <cstdint>

#include "kernels/mma_sync/config.cuh"
#include "kernels/mma_sync/instruction.cuh"
#include "kernels/mma_sync/operand_tile.cuh"

namespace tcgemm::mma {

template <typename Config, typename Instruction>
struct KernelTraits {
  static constexpr int kElementBytes = Instruction::kElementBytes;
  static constexpr int kTileK = Config::kTileKBytes / kElementBytes;
  static constexpr int kSteps = Config::kTileKBytes / 32;
  using A = OperandTile<Role::kA, kElementBytes, Config::kTileM, Config::kWarpM, Config::kTileKBytes,
                        !Config::kATransposed, Config::kThreads>;
  using B = OperandTile<Role::kB, kElementBytes, Config::kTileN, Config::kWarpN, Config::kTileKBytes,
                        Config::kBTransposed, Config::kThreads>;
  static constexpr int kMmasM = Config::kWarpM / 16;
  static constexpr int kMmasN = Config::kWarpN / 8;
  using Accumulators = typename Instruction::Accumulator[kMmasM][kMmasN];

  // Partial sums of 16 rows of a warp. The padding spreads rows over the banks: a fragment store
  // covers 8 columns of 4 rows, or 16 columns of 2 rows.
  static constexpr int kStagingPadding = B::kOrder == FragmentOrder::kConsecutive ? 8 : 16;
  static constexpr int kStagingPitch = Config::kWarpN + kStagingPadding;
  static constexpr int kStagingBytesPerWarp = 16 * kStagingPitch * 4;

  static_assert(A::kBytes + B::kBytes == Config::kStageBytes, "the stage holds both tiles");
  static_assert(Config::kThreads / 32 * kStagingBytesPerWarp <= Config::kSharedBytes, "partial sums reuse the stages");
  static_assert(kSteps % 2 == 0, "two fragment buffers alternate within a tile");
};

template <typename Traits, typename Instruction>
__device__ __forceinline__ void multiply_step(typename Traits::Accumulators& accumulators,
                                              typename Traits::A::Fragments& a, typename Traits::B::Fragments& b) {
  if constexpr (Instruction::kRoundsToTF32) {
#pragma unroll
    for (auto& group : a) {
#pragma unroll
      for (uint32_t& x : group) x = ptx::cvt_rna_tf32_f32(x);
    }
#pragma unroll
    for (auto& group : b) {
#pragma unroll
      for (uint32_t& x : group) x = ptx::cvt_rna_tf32_f32(x);
    }
  }
#pragma unroll
  for (int i = 0; i < Traits::kMmasM; ++i) {
    const uint32_t a_registers[4] = {a[2 * i][0], a[2 * i + 1][0], a[2 * i][1], a[2 * i + 1][1]};
#pragma unroll
    for (int step = 0; step < Traits::kMmasN; ++step) {
      // Serpentine: neighbouring instructions share a register operand.
      const int j = i % 2 == 0 ? step : Traits::kMmasN - 1 - step;
      Instruction::multiply_add(accumulators[i][j], a_registers, b[j]);
    }
  }
}

// One k-step of the tile in `stage_address`: loads the fragments of the next step, issues its share
// of the copies, multiplies.
template <int kStep, typename Config, typename Instruction, typename Mainloop>
__device__ __forceinline__ void run_step(Mainloop& loop) {
  using Traits = KernelTraits<Config, Instruction>;
  using A = typename Traits::A;
  using B = typename Traits::B;
  constexpr int kNextStep = (kStep + 1) % Traits::kSteps;
  constexpr int kCopySteps = Traits::kSteps - 1;
  if constexpr (kNextStep == 0) {
    ptx::cp_async_wait_group<Config::kStages - 2>();
    __syncthreads();
    loop.read_offset = loop.next_stage(loop.read_offset);
  }
  A::template load<kNextStep>(loop.a_fragments[kNextStep % 2], loop.a_address + loop.read_offset);
  B::template load<kNextStep>(loop.b_fragments[kNextStep % 2], loop.b_address + loop.read_offset);
  // Here, because the branch also keeps the compiler from sinking the loads above below the multiplications.
  if constexpr (kStep == 0) loop.copy_narrow();
  if constexpr (kStep < kCopySteps) {
    A::template copy_wide<A::kPasses * kStep / kCopySteps, A::kPasses*(kStep + 1) / kCopySteps>(
        loop.a_source, loop.write_offset, loop.k_to_copy);
    B::template copy_wide<B::kPasses * kStep / kCopySteps, B::kPasses*(kStep + 1) / kCopySteps>(
        loop.b_source, loop.write_offset, loop.k_to_copy);
    if constexpr (kStep == kCopySteps - 1) loop.finish_copy();
  }
  multiply_step<Traits, Instruction>(loop.accumulators, loop.a_fragments[kStep % 2], loop.b_fragments[kStep % 2]);
}

template <typename Config, typename Instruction>
struct Mainloop {
  using Traits = KernelTraits<Config, Instruction>;
  using A = typename Traits::A;
  using B = typename Traits::B;

  typename A::Source a_source;
  typename B::Source b_source;
  uint32_t a_address, b_address;  // where this lane loads fragments, in stage 0
  int k_to_copy;                  // elements of K not yet copied; negative once past the end
  uint32_t read_offset = 0, write_offset = 0;
  typename A::Fragments a_fragments[2];
  typename B::Fragments b_fragments[2];
  typename Traits::Accumulators accumulators = {};

  static __device__ __forceinline__ uint32_t next_stage(uint32_t offset) {
    constexpr uint32_t kLast = (Config::kStages - 1) * Config::kStageBytes;
    return offset == kLast ? 0 : offset + Config::kStageBytes;
  }

  __device__ __forceinline__ void finish_copy() {
    ptx::cp_async_commit_group();
    A::advance(a_source);
    B::advance(b_source);
    k_to_copy -= Traits::kTileK;
    write_offset = next_stage(write_offset);
  }

  __device__ __forceinline__ void copy_narrow() {
    A::copy_narrow(a_source, write_offset, k_to_copy);
    B::copy_narrow(b_source, write_offset, k_to_copy);
  }

  // Copies beyond the last tile write zeros, which nothing multiplies.
  __device__ __forceinline__ void run() {
    const int num_tiles = (k_to_copy + Traits::kTileK - 1) / Traits::kTileK;
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages - 1; ++stage) {
      copy_narrow();
      A::template copy_wide<0, A::kPasses>(a_source, write_offset, k_to_copy);
      B::template copy_wide<0, B::kPasses>(b_source, write_offset, k_to_copy);
      finish_copy();
    }
    ptx::cp_async_wait_group<Config::kStages - 2>();
    __syncthreads();
    A::template load<0>(a_fragments[0], a_address);
    B::template load<0>(b_fragments[0], b_address);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      run_step<0, Config, Instruction>(*this);
      run_step<1, Config, Instruction>(*this);
      if constexpr (Traits::kSteps == 4) {
        run_step<2, Config, Instruction>(*this);
        run_step<3, Config, Instruction>(*this);
      }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }
};

}  // namespace tcgemm::mma
