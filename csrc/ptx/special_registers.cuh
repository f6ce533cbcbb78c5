// Special registers that CUDA C++ has a name for, read once more where a compiler would keep the first reading.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// blockIdx.x. PTX 1.0
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

}  // namespace tcgemm::ptx
