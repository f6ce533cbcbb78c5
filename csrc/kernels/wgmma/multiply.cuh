// One k block of a tile: from operand tiles in shared memory to a consumer warpgroup's accumulators.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

namespace tcgemm::wgmma_family {

// Where a lane finds its elements of A's fragment in chunks of 32 float32 along M, one 128-byte row
// for each k: offsets[2 * j + h] is that of row lane / 4 + 8 * h of its warp's 16, k = lane % 4 + 4 * j.
__device__ __forceinline__ void m_major_fragment_offsets(uint32_t (&offsets)[4], int thread_idx) {
  const int warp = thread_idx / 32, row = thread_idx % 32 / 4, k = thread_idx % 4;
  const uint32_t unit = warp % 2 * 4 + row / 4;  // of 16 bytes; the swizzle flips its bits by those of k
  const uint32_t first = warp / 2 * 4096 + k * 128 + (unit ^ k) * 16 + row % 4 * 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    offsets[h] = first ^ h * 32;
    offsets[2 + h] = (first ^ h * 32 ^ 64) + 512;
  }
}

// acc (+)= A * B of one k block whose tiles start at shared addresses a and b, for the first kWidth of
// B's columns and the first kSteps instructions along K (0: all). Returns with these multiplications
// under way; those of the k block before are done when `release_previous` runs.
template <typename T, typename In, int kTransA, int kTransB, int kWidth = 0, int kSteps = 0, int kCount,
          typename Release>
__device__ __forceinline__ void multiply_from_shared(float (&acc)[T::kBlocksM][kCount], uint32_t a, uint32_t b,
                                                     bool accumulate, Release release_previous) {
  constexpr int kUsed = kWidth == 0 ? kCount : kWidth / 2;
  const auto used = [&](int block) -> float (&)[kUsed] { return reinterpret_cast<float (&)[kUsed]>(acc[block]); };
  const uint64_t a_desc = ptx::swizzle_128b_descriptor(a, 8192, 1024);
  const uint64_t b_desc = ptx::swizzle_128b_descriptor(b, 8192, 1024);
#pragma unroll
  for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand(used(block));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < (kSteps == 0 ? T::kTileK / T::kMmaK : kSteps); ++step) {
    // One step along K: 32 bytes inside a swizzle row, or 16 rows of 128 bytes.
    constexpr uint64_t kStepA = (kTransA ? T::kMmaK * 128 : 32) >> 4;
    constexpr uint64_t kStepB = (kTransB ? T::kMmaK * 128 : 32) >> 4;
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) {
      ptx::wgmma_m64k32b<In, kTransA, kTransB>(used(block), a_desc + step * kStepA + block * (8192 >> 4),
                                               b_desc + step * kStepB, accumulate || step != 0);
    }
  }
  ptx::wgmma_commit_group();
#pragma unroll
  for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand(used(block));
  ptx::wgmma_wait_group<1>();
  release_previous();
}

// The same with an M-major A, in two halves: one's fragments are loaded while the other multiplies.
template <typename T, int kCount, typename Release>
__device__ __forceinline__ void multiply_from_registers(float (&acc)[T::kBlocksM][kCount], uint32_t a, uint32_t b,
                                                        const uint32_t (&fragment_offsets)[4], bool accumulate,
                                                        Release release_previous) {
  constexpr int kSteps = T::kTileK / T::kMmaK / 2;
  const uint64_t b_desc = ptx::swizzle_128b_descriptor(b, 8192, 1024);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t fragments[kSteps][T::kBlocksM][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t offset = (half * kSteps + step) * T::kMmaK * 128 + block * 8192;
          fragments[step][block][i] = ptx::ld_shared_u32(a + fragment_offsets[i] + offset);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand(acc[block]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
        ptx::wgmma_m64k8_tf32(acc[block], fragments[step][block], b_desc + (half * kSteps + step) * (32 >> 4),
                              accumulate || half != 0 || step != 0);
      }
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand(acc[block]);
    ptx::wgmma_wait_group<1>();
    if (half == 0) release_previous();
  }
}

}  // namespace tcgemm::wgmma_family
