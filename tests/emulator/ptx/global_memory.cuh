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

// Stores to other devices' memory happen at any time until a release of the same block.
inline void st_relaxed_sys_v4_u32(void* address, const uint32_t (&r)[4]) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulator::fail("a vector store is not aligned");
  const std::array<uint32_t, 4> words{r[0], r[1], r[2], r[3]};
  emulator::write_remotely([=] { std::memcpy(address, words.data(), 16); });
}
inline void st_relaxed_sys_u32(uint32_t* address, uint32_t x) { emulator::store_flag(address, x); }
inline void ld_relaxed_sys_v4_u32(uint32_t (&r)[4], const void* address) { ld_global_v4_u32(r, address); }
inline uint64_t ld_relaxed_sys_u64(const uint64_t* address) { return ld_global<uint64_t>(address); }
inline void st_release_sys_u64(uint64_t* address, uint64_t x) { emulator::release_flag(address, x); }
inline uint64_t ld_acquire_sys_u64(const uint64_t* address) { return emulator::poll_flag(address); }

}  // namespace tcgemm::ptx
