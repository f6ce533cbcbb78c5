// One k block of a tile: from operand tiles in shared memory to a consumer warpgroup's accumulators.
#pragma once

#include <cstdint>

#include "kernels/wgmma/scales.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

namespace tcgemm::wgmma_family {

// The instruction's A from registers: what fills them is made by each thread once, and loads the fragments of 64
// rows, number `block` of a tile that starts at a shared address, for the instruction number `step` along K.
template <typename Tile, tile::Source kSource = Tile::kSource>
class Fragments;

// There are none.
template <typename Tile>
class Fragments<Tile, tile::Source::kShared> {
 public:
  __device__ __forceinline__ explicit Fragments(int) {}
};

// From chunks of 32 elements of 32 bits along M, one 128-byte row for each k.
template <typename Tile>
class Fragments<Tile, tile::Source::kTransposed> {
 public:
  __device__ __forceinline__ explicit Fragments(int thread_idx) {
    const int warp = thread_idx / 32, row = thread_idx % 32 / 4, k = thread_idx % 4;
    const uint32_t unit = warp % 2 * 4 + row / 4;  // of 16 bytes; the swizzle flips its bits by those of k
    const uint32_t first = warp / 2 * 4096 + k * 128 + (unit ^ k) * 16 + row % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      offsets_[h] = first ^ h * 32;
      offsets_[2 + h] = (first ^ h * 32 ^ 64) + 512;
    }
  }

  __device__ __forceinline__ void load(uint32_t (&fragment)[4], uint32_t tile, int step, int block) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = ptx::ld_shared_u32(tile + offsets_[i] + (step * 8 * 128 + block * 8192));
  }

 private:
  static_assert(sizeof(typename Tile::Element) == 4 && !Tile::kIsKMajor, "8 of K in 32 bytes");

  // offsets_[2 * j + h] is that of row lane / 4 + 8 * h of its warp's 16, k = lane % 4 + 4 * j.
  uint32_t offsets_[4];
};

// acc (+)= A * B of one k block whose tiles start at shared addresses a and b, for the first kWidth of
// B's columns and the first kSteps instructions along K. Returns with these multiplications
// under way; those of the k block before are done when `release_previous` runs.
template <typename T, int kWidth = T::Config::kTileN, int kSteps = T::kSteps, int kBlocks, int kAccs, typename Release>
__device__ __forceinline__ void multiply_from_shared(float (&acc)[kBlocks][kAccs], uint32_t a, uint32_t b,
                                                     bool accumulate, Release release_previous) {
  using Mma = typename T::Mma;
  constexpr bool kTransA = !T::A::kIsKMajor, kTransB = !T::B::kIsKMajor;
  constexpr int kUsed = kWidth / 2;
  const auto used = [&](int block) -> float (&)[kUsed] { return reinterpret_cast<float (&)[kUsed]>(acc[block]); };
  const uint64_t a_desc = ptx::swizzle_128b_descriptor(a, 8192, 1024);
  const uint64_t b_desc = ptx::swizzle_128b_descriptor(b, 8192, 1024);  // mutant: wrong_stride
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(used(block));
  ptx::wgmma_fence();  // mutant: registers_not_handed_over
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    // One step along K: 32 bytes inside a swizzle row, or 16 rows of 128 bytes.
    constexpr uint64_t kStepA = (kTransA ? T::kMmaK * 128 : 32) >> 4;
    constexpr uint64_t kStepB = (kTransB ? T::kMmaK * 128 : 32) >> 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      // mutant: exchanged_types, wrong_half_of_k
      ptx::wgmma_m64k32b<typename Mma::A, typename Mma::B, kTransA, kTransB>(
          used(block), a_desc + step * kStepA + block * (8192 >> 4), b_desc + step * kStepB, accumulate || step != 0);
    }
  }
  ptx::wgmma_commit_group();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(used(block));
  ptx::wgmma_wait_group<1>();  // mutant: stages_released_early
  release_previous();
}

// acc += A * B of one k block, times its block scales: the tensor core accumulates the k block from zero, and its
// accumulators are promoted, that is, added to float32 registers, part by part. `release` runs when nothing reads the
// stage any more.
template <typename T, int kWidth = T::Config::kTileN, typename Release>
__device__ __forceinline__ void multiply_and_promote(float (&acc)[T::kBlocksM][T::Config::kTileN / 2], uint32_t a,
                                                     uint32_t b, const Scales<T>& scales, Release release) {
  // Where not all columns are used, of two parts along them each has half of those.
  constexpr int kBlocks = T::kPartBlocks, kHalf = (kWidth / 2 + 7) / 8 * 8;
  constexpr int kColumns = kWidth <= T::kPartColumns ? kWidth : kHalf;
#pragma unroll
  for (int block = 0; block < T::kBlocksM; block += kBlocks) {
#pragma unroll
    for (int column = 0; column < kWidth; column += kColumns) {
      float partial[kBlocks][kColumns / 2];
      // mutant: no_promotion, half_of_the_rows, half_of_the_columns, not_started_anew
      multiply_from_shared<T, kColumns>(partial, a + block * 8192, b + column * 128, false, [] {});
      const auto held = scales.template load<kBlocks, kColumns>(block, column);
      ptx::wgmma_wait_group<0>();  // mutant: not_waited_for
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) ptx::wgmma_fence_operand<T::kIsInteger>(partial[i]);
      // mutant: released_after_the_first_part
      const bool is_last = block + kBlocks == T::kBlocksM && column + kColumns >= kWidth;
      if (is_last && !held.kReadsStage) release();  // mutant: released_too_early
      held.promote(acc, partial, block, column);
      if (is_last && held.kReadsStage) release();
    }
  }
}

// multiply_from_shared with A in registers, in two halves: one's fragments are loaded while the other multiplies.
template <typename T, typename Release>
__device__ __forceinline__ void multiply_from_registers(float (&acc)[T::kBlocksM][T::Config::kTileN / 2], uint32_t a,
                                                        uint32_t b, const Fragments<typename T::A>& fragments_of_a,
                                                        bool accumulate, Release release_previous) {
  using Mma = typename T::Mma;
  constexpr int kSteps = T::kSteps / 2;
  static_assert(T::B::kIsKMajor, "a step along K is 32 bytes of B's rows");
  const uint64_t b_desc = ptx::swizzle_128b_descriptor(b, 8192, 1024);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t fragments[kSteps][T::kBlocksM][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
        fragments_of_a.load(fragments[step][block], a, half * kSteps + step, block);
      }
    }
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(acc[block]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
        ptx::wgmma_m64k32b<typename Mma::A, typename Mma::B>(acc[block], fragments[step][block],
                                                             b_desc + (half * kSteps + step) * (32 >> 4),
                                                             accumulate || half != 0 || step != 0);
      }
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(acc[block]);
    ptx::wgmma_wait_group<1>();
    if (half == 0) release_previous();
  }
}

}  // namespace tcgemm::wgmma_family
