// Stands in for csrc/ptx/shared_memory.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline void ld_shared_v2_u32(uint32_t& r0, uint32_t& r1, uint32_t address) {
  const auto* words = static_cast<const uint8_t*>(emulator::shared_pointer(address, 8));
  std::memcpy(&r0, words, 4);
  std::memcpy(&r1, words + 4, 4);
}
template <typename T>
T load_shared(uint32_t address) {
  T r;
  std::memcpy(&r, emulator::shared_pointer(address, sizeof(T)), sizeof(T));
  return r;
}
inline uint32_t ld_shared_u32(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint4 ld_shared_v4_u32(uint32_t address) { return load_shared<uint4>(address); }
inline float4 ld_shared_v4_f32(uint32_t address) { return load_shared<float4>(address); }
template <typename T>
void ld_shared(T& r, uint32_t address) {
  r = load_shared<T>(address);
}
inline void st_shared_f32(uint32_t address, float x) { std::memcpy(emulator::stored_pointer(address, 4), &x, 4); }
inline void st_shared_v2_f32(uint32_t address, float x, float y) {
  const float both[2] = {x, y};
  std::memcpy(emulator::stored_pointer(address, 8), both, 8);
}
inline void st_shared_v2_u32(uint32_t address, const uint32_t (&r)[2]) {
  std::memcpy(emulator::stored_pointer(address, 8), r, 8);
}
inline void st_shared_v4_u32(uint32_t address, const uint32_t (&r)[4]) {
  std::memcpy(emulator::stored_pointer(address, 16), r, 16);
}

inline void st_shared_zeros_16(uint32_t address, bool valid) {
  if (valid) std::memset(emulator::stored_pointer(address, 16), 0, 16);
}

}  // namespace tcgemm::ptx
