// Functions of floats, one instruction each.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// Approximate functions of the special function unit: subnormals count as 0. PTX ISA 1.4.

// 2^x, relative error at most 2^-22.5.
__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, at most 1 ulp off.
__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / y, at most 2 ulp off. PTX ISA 1.4.
__device__ __forceinline__ float div_full_f32(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Two bfloat16 numbers, rounded to nearest even. PTX ISA 7.0, sm_80. That of one number alone is several times slower.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// NaN where either is, and -0 is less than 0. PTX ISA 7.0, sm_80.

__device__ __forceinline__ float max_nan_f32(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float min_nan_f32(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace tcgemm::ptx
