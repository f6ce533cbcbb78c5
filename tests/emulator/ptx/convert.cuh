// Stands in for csrc/ptx/convert.cuh.
#pragma once

#include <cmath>
#include <cstdint>

namespace tcgemm::ptx {

// Rounded to nearest even, with so many bits of mantissa and this exponent of the smallest normal number.
inline uint32_t to_8_bits(float x, int mantissa, int exponent, double largest, uint32_t largest_bits) {
  if (x != x) return 0x7F;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= largest) return sign | largest_bits;
  int own = exponent;
  if (magnitude > 0) own = std::max(std::ilogb(magnitude), exponent);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa - own)));
  // Units of a binade above the first begin with the implicit bit, and carry into the next exponent.
  return sign | (units + (static_cast<uint32_t>(own - exponent) << mantissa));
}

inline uint32_t e4m3_of(float x) { return to_8_bits(x, 3, -6, 448, 0x7E); }
inline uint32_t e5m2_of(float x) { return to_8_bits(x, 2, -14, 57344, 0x7B); }

inline uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) { return e4m3_of(high) << 8 | e4m3_of(low); }
inline uint32_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) { return e5m2_of(high) << 8 | e5m2_of(low); }

inline int32_t cvt_rni_s32_f32(float x) { return x != x ? 0 : static_cast<int32_t>(std::nearbyint(x)); }

}  // namespace tcgemm::ptx
