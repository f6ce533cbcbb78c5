// Special registers that CUDA C++ has names for, read anew at each call: what is derived from them is not kept in
// registers across a loop whose accumulators need them.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// threadIdx.x. PTX 1.0
__device__ __forceinline__ uint32_t tid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// blockIdx.x. PTX 1.0
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Nanoseconds, by one clock of all SMs. PTX 3.1
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  return x;
}

}  // namespace tcgemm::ptx
