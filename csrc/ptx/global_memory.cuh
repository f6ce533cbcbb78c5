// Plain accesses to global memory that must be one instruction. PTX 1.0.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

__device__ __forceinline__ void st_global_v4_u32(void* address, const uint32_t (&r)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace tcgemm::ptx
