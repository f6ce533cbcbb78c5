// Stands in for csrc/ptx/math.cuh: exact where the hardware is approximate.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tcgemm::ptx {

inline float ex2_approx_ftz_f32(float x) { return std::exp2(x); }
inline float rcp_approx_ftz_f32(float x) { return 1.0f / x; }

inline float div_full_f32(float x, float y) { return x / y; }

// The upper half of a number, after it has been rounded.
inline uint32_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_rn_bf16x2_f32(float high, float low) { return bf16_of(high) << 16 | bf16_of(low); }

inline float max_nan_f32(float x, float y) {
  if (x == y) return std::signbit(x) ? y : x;
  return x > y || x != x ? x : y;
}
inline float min_nan_f32(float x, float y) {
  if (x == y) return std::signbit(x) ? x : y;
  return x < y || x != x ? x : y;
}

}  // namespace tcgemm::ptx
