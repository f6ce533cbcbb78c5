// Warpgroup matrix multiply-accumulate: ordering instructions and shared-memory descriptors. The
// instruction itself is in wgmma_shapes.cuh, generated at build time.
#pragma once

#include <cstdint>

#include "ptx/wgmma_shapes.cuh"

namespace tcgemm::ptx {

// PTX 8.0, sm_90a, all three
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across a wgmma boundary; those that hold the bits of integers
// as the registers that they are there.
template <bool kHoldsIntegers = false, int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kHoldsIntegers) {
      asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(registers[i]))::"memory");
    } else {
      asm volatile("" : "+f"(registers[i])::"memory");
    }
  }
}

// Matrix descriptor of a tile with 128-byte swizzle (PTX ISA "matrix-descriptor"). Offsets in bytes.
//   K-major:  rows of 128 bytes; stride_bytes = 1024 between groups of 8 rows; leading unused.
//   MN-major: rows of 64 elements along M or N, one row for each k; stride_bytes = 1024 between
//             groups of 8 k, leading_bytes between chunks of 64 elements.
__device__ __forceinline__ uint64_t swizzle_128b_descriptor(uint32_t address, uint32_t leading_bytes,
                                                            uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128B = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | kSwizzle128B << 62;
}

}  // namespace tcgemm::ptx
