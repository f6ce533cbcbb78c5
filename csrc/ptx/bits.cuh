// Logic on 32 bits, one instruction each (PTX ISA: logic and shift instructions, lop3). PTX 4.3.
//
// Of (x & mask) | bits the compiler makes two instructions where both are constants, since one has room for one.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// (x & mask) | bits
__device__ __forceinline__ uint32_t lop3_and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

// (~x & mask) | bits
__device__ __forceinline__ uint32_t lop3_not_and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

}  // namespace tcgemm::ptx
