// Element types of instructions for which CUDA's headers have no type of their own.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// A float32 of which the tensor core reads the high 19 bits.
struct TF32 {
  uint32_t bits;
};

// Floats of 8 bits: float8_e4m3fn, which has no infinity, and float8_e5m2. CUDA's own types bring conversions and half
// precision with them, which nothing needs that only multiplies.
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
// float8_e8m0fnu, a power of two: 2^(bits - 127), NaN where bits are 255.
struct E8M0 {
  uint8_t bits;
};

}  // namespace tcgemm::ptx
