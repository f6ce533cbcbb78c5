// Element types that C++17 has no name for, as they lie in memory, and their conversions in
// plain integer arithmetic. The instruction-set specific code overloads what a machine has an
// instruction for.
#pragma once

#include <cstdint>
#include <cstring>

namespace tcgemm::host {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
// A float32 in memory that takes part in products rounded to TF32.
struct TF32 {
  float value;
};
template <typename Real>
struct Complex {
  Real re, im;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The half conversions move the exponent by multiplying with powers of two, so that subnormals,
// infinities and NaNs need no branch of their own.
inline float to_real(F16 x) {
  const uint32_t shifted = uint32_t{x.bits} << 16;
  const uint32_t magnitude = shifted << 1;
  const float normal = float_of((magnitude >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = float_of((magnitude >> 17) | (126u << 23)) - 0.5f;
  return float_of((shifted & 0x80000000u) | bits_of(magnitude < (1u << 27) ? subnormal : normal));
}
inline float to_real(BF16 x) { return float_of(uint32_t{x.bits} << 16); }
inline float to_real(float x) { return x; }
inline double to_real(double x) { return x; }

// TF32 keeps 10 bits of the mantissa: to nearest, ties away from zero, as cvt.rna.tf32 does.
inline float to_real(TF32 x) {
  const uint32_t bits = bits_of(x.value);
  const bool is_finite = (bits & 0x7F800000u) != 0x7F800000u;
  return is_finite ? float_of((bits + 0x1000u) & 0xFFFFE000u) : x.value;
}

// Rounds to nearest even.
inline F16 to_f16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits << 1;
  const float scaled = (float_of(bits & 0x7FFFFFFFu) * 0x1p+112f) * 0x1p-110f;
  const uint32_t exponent = magnitude & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  const uint32_t rounded = bits_of(float_of((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t finite = ((rounded >> 13) & 0x7C00u) + (rounded & 0x0FFFu);
  return {static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude > 0xFF000000u ? 0x7E00u : finite))};
}
inline BF16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

}  // namespace tcgemm::host
