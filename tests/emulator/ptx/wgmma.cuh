// Stands in for csrc/ptx/wgmma.cuh and for what generate_wgmma.py writes.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline void wgmma_fence() { emulator::current().has_fenced_registers = true; }
inline void wgmma_commit_group() { emulator::wgmma_commit(); }
template <int kPending>
void wgmma_wait_group() {
  emulator::wgmma_wait(kPending);
}
template <bool kHoldsIntegers = false, int kCount>
void wgmma_fence_operand(float (&)[kCount]) {}

template <typename A, typename B, int kTransA, int kTransB, int kCount>
void wgmma_m64k32b(float (&d)[kCount], uint64_t desc_a, uint64_t desc_b, uint32_t accumulate) {
  emulator::wgmma({emulator::format_of<A>(), emulator::format_of<B>(), kCount / 2 * 4, kTransA != 0, kTransB != 0,
                   false, desc_a, desc_b, accumulate != 0},
                  d, nullptr);
}
template <typename A, typename B, int kCount>
void wgmma_m64k32b(float (&d)[kCount], const uint32_t (&a)[4], uint64_t desc_b, uint32_t accumulate) {
  emulator::wgmma({emulator::format_of<A>(), emulator::format_of<B>(), kCount / 2 * 4, false, false, true, 0, desc_b,
                   accumulate != 0},
                  d, a);
}

inline uint64_t swizzle_128b_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128B = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | kSwizzle128B << 62;
}

}  // namespace tcgemm::ptx
