// Conversions of float32 to numbers of 8 bits, two in an instruction, and to integers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// Rounded to nearest even; what is larger than the largest number becomes that. PTX ISA 8.1, sm_89.

__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ uint32_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
  uint16_t y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}

// Rounded to nearest even; 0 for NaN. PTX ISA 1.0.
__device__ __forceinline__ int32_t cvt_rni_s32_f32(float x) {
  int32_t y;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

}  // namespace tcgemm::ptx
