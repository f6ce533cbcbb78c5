// Stands in for csrc/ptx/mma.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

using emulator::Format;

inline void mma_m16n8k16_f32_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1) {
  emulator::mma(Format::kF16, Format::kF16, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k16_f32_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1) {
  emulator::mma(Format::kBF16, Format::kBF16, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k8_f32_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1) {
  emulator::mma(Format::kTF32, Format::kTF32, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k32_s32_s8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  emulator::mma(Format::kS8, Format::kS8, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k32_s32_u8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  emulator::mma(Format::kU8, Format::kU8, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k32_s32_s8_u8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1) {
  emulator::mma(Format::kS8, Format::kU8, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k32_s32_u8_s8(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1) {
  emulator::mma(Format::kU8, Format::kS8, d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_m16n8k16_f16_f16(uint32_t (&d)[2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = emulator::to_float(Format::kF16, d[i / 2] >> i % 2 * 16);
  emulator::mma(Format::kF16, Format::kF16, sums, {a0, a1, a2, a3, b0, b1});
  for (int i = 0; i < 2; ++i) {
    const __half2 pair = __floats2half2_rn(sums[2 * i], sums[2 * i + 1]);
    std::memcpy(&d[i], &pair, 4);
  }
}
inline uint32_t cvt_rn_tf32_f32(uint32_t x) { return emulator::round_to_tf32(x); }
inline uint32_t cvt_rna_tf32_f32(uint32_t x) { return emulator::round_to_tf32(x); }

}  // namespace tcgemm::ptx
