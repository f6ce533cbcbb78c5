// Stands in for csrc/ptx/global_memory.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

template <int kWords>
void store_global(void* address, const uint32_t (&r)[kWords]) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(r) != 0) emulator::fail("a vector store is not aligned");
  std::memcpy(address, r, sizeof(r));
}
inline void st_global_v4_u32(void* address, const uint32_t (&r)[4]) { store_global(address, r); }
inline void st_global_v2_u32(void* address, const uint32_t (&r)[2]) { store_global(address, r); }
template <typename Word>
Word ld_global(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0) emulator::fail("a load is not aligned");
  Word x;
  std::memcpy(&x, address, sizeof(x));
  return x;
}
inline void ld_global_v4_u32(uint32_t* r, const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulator::fail("a vector load is not aligned");
  std::memcpy(r, address, 16);
}
inline void prefetch_global_l2(const void*) {}

}  // namespace tcgemm::ptx
