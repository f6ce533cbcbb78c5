// Approximate functions of the special function unit, one instruction each; subnormals count as 0.
// PTX ISA 1.4, https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
#pragma once

namespace tcgemm::ptx {

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

}  // namespace tcgemm::ptx
