// Stands in for csrc/ptx/bits.cuh.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

inline uint32_t lop3_and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t lop3_not_and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (~x & mask) | bits; }

}  // namespace tcgemm::ptx
