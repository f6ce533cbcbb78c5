// What nvcc gives to every file, of which host compilers have nothing: functions of numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#undef __forceinline__
#define __forceinline__ inline

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t{x} * y >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

template <typename X, typename Y>
constexpr std::common_type_t<X, Y> min(X x, Y y) {
  using T = std::common_type_t<X, Y>;
  return static_cast<T>(x) < static_cast<T>(y) ? x : y;
}
template <typename X, typename Y>
constexpr std::common_type_t<X, Y> max(X x, Y y) {
  using T = std::common_type_t<X, Y>;
  return static_cast<T>(x) < static_cast<T>(y) ? y : x;
}

// Towards zero, as far as the type goes. NaN is what PTX says: 0, or the highest bit where 64 bits are involved.
namespace emulator {
template <typename T, typename Real>
T convert_rz(Real x) {
  constexpr bool has_64_bits = sizeof(T) == 8 || sizeof(Real) == 8;
  if (x != x) return has_64_bits ? static_cast<T>(std::make_unsigned_t<T>(1) << (8 * sizeof(T) - 1)) : T(0);
  // The first number that is too large is a power of two.
  if (x >= std::ldexp(Real(1), std::numeric_limits<T>::digits)) return std::numeric_limits<T>::max();
  if (x <= static_cast<Real>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(x);
}
}  // namespace emulator
inline int __float2int_rz(float x) { return emulator::convert_rz<int>(x); }
inline unsigned __float2uint_rz(float x) { return emulator::convert_rz<unsigned>(x); }
inline long long __float2ll_rz(float x) { return emulator::convert_rz<long long>(x); }
inline unsigned long long __float2ull_rz(float x) { return emulator::convert_rz<unsigned long long>(x); }
inline int __double2int_rz(double x) { return emulator::convert_rz<int>(x); }
inline unsigned __double2uint_rz(double x) { return emulator::convert_rz<unsigned>(x); }
inline long long __double2ll_rz(double x) { return emulator::convert_rz<long long>(x); }
inline unsigned long long __double2ull_rz(double x) { return emulator::convert_rz<unsigned long long>(x); }

inline double rsqrt(double x) { return static_cast<double>(1 / std::sqrt(static_cast<long double>(x))); }
inline float rsqrtf(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }

// By Newton's method, for the tail of y > 0 as for the rest: erf(-x) = -erf(x).
inline double erfinv(double y) {
  if (y < 0) return -erfinv(-y);
  if (!(y < 1)) return y == 1 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  if (y < 1e-9) return y * 0.88622692545275801365;                       // sqrt(pi) / 2
  const double rest = std::log((1 - y) * (1 + y)), a = 4.33 + rest / 2;  // by Winitzki
  double x = std::sqrt(std::sqrt(a * a - rest / 0.147) - a);
  for (int i = 0; i < 4; ++i) {
    const double slope = 1.1283791670955126 * std::exp(-x * x);
    x += (y < 0.5 ? y - std::erf(x) : std::erfc(x) - (1 - y)) / slope;
  }
  return x;
}
inline float erfinvf(float y) { return static_cast<float>(erfinv(y)); }
