// What generated elementwise functions call besides CUDA's own: JAX's operations on scalars as XLA defines them, where
// C++ differs, and the roundings between dtypes.
//
// A number is stored as one type and computed with as another: float16, bfloat16 and both 8-bit floats as a float that
// holds one of their values, everything else as itself. `wide` makes the second of the first, `narrow` the first of any
// number, rounded to nearest, ties to even, and `rounded` is both. The payload of a NaN is not kept.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/trigonometry.cuh"
#include "ptx/math.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::elementwise {

struct Float8E4M3 {  // float8_e4m3fn: no infinity, 448 is the largest
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <int kBytes>
struct Unsigned;
template <>
struct Unsigned<1> {
  using type = uint8_t;
};
template <>
struct Unsigned<2> {
  using type = uint16_t;
};
template <>
struct Unsigned<4> {
  using type = uint32_t;
};
template <>
struct Unsigned<8> {
  using type = uint64_t;
};
// The unsigned integer of as many bytes.
template <typename T>
using Bits = typename Unsigned<sizeof(T)>::type;

template <typename T>
inline constexpr int kNumBits = 8 * sizeof(T);
template <typename T>
inline constexpr bool kIsSigned = T(-1) < T(0);
// Of an integer type.
template <typename T>
inline constexpr T kLargest = kIsSigned<T> ? T(Bits<T>(-1) >> 1) : T(-1);
template <typename T>
inline constexpr T kSmallest = T(~kLargest<T>);

template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the bits of one are those of the other");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Real>
__device__ __forceinline__ Real infinity() {
  if constexpr (sizeof(Real) == 4) return bit_cast<Real>(uint32_t{0x7F800000});
  if constexpr (sizeof(Real) == 8) return bit_cast<Real>(uint64_t{0x7FF0000000000000});
}
template <typename Real>
__device__ __forceinline__ Real not_a_number() {
  if constexpr (sizeof(Real) == 4) return bit_cast<Real>(uint32_t{0x7FC00000});
  if constexpr (sizeof(Real) == 8) return bit_cast<Real>(uint64_t{0x7FF8000000000000});
}

// Stored and computed numbers --------------------------------------------------------------------

__device__ __forceinline__ float wide(__half x) { return convert<float>(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return convert<float>(x); }
__device__ __forceinline__ float wide(Float8E5M2 x) {
  return convert<float>(bit_cast<__half>(static_cast<uint16_t>(x.bits << 8)));
}
__device__ __forceinline__ float wide(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7F, sign = x.bits & 0x80;
  if (magnitude == 0x7F) return not_a_number<float>();
  // The exponent of float16 is biased by 15, this one by 7.
  return 256.0f * convert<float>(bit_cast<__half>(static_cast<uint16_t>(sign << 8 | magnitude << 7)));
}

// The code of an 8-bit float without its sign, as if exponents had no end: the next ones are those of infinity or NaN.
template <int kBias, int kMantissaBits>
__device__ __forceinline__ uint32_t encode_magnitude(uint32_t magnitude) {
  constexpr int kDropped = 23 - kMantissaBits;
  if (magnitude < uint32_t{128 - kBias} << 23) {
    // Subnormal: a float so large rounds at the smallest of them.
    constexpr float kLarge = 1 << (24 - kBias - kMantissaBits);
    return bit_cast<uint32_t>(bit_cast<float>(magnitude) + kLarge) - bit_cast<uint32_t>(kLarge);
  }
  const uint32_t is_odd = magnitude >> kDropped & 1;
  const uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1 + is_odd;
  return (rounded >> kDropped) - (uint32_t{127 - kBias} << kMantissaBits);
}

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return bit_cast<T>(static_cast<uint16_t>(ptx::cvt_rn_bf16x2_f32(0.0f, x)));
  } else if constexpr (std::is_same_v<T, Float8E4M3> || std::is_same_v<T, Float8E5M2>) {
    const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7FFFFFFF;
    uint32_t code;
    if constexpr (std::is_same_v<T, Float8E4M3>) {
      code = encode_magnitude<7, 3>(magnitude);
      if (code > 0x7F) code = 0x7F;  // NaN, also of what is too large
    } else {
      code = encode_magnitude<15, 2>(magnitude);
      if (code > 0x7C) code = magnitude > 0x7F800000 ? 0x7E : 0x7C;
    }
    return {static_cast<uint8_t>(code | bits >> 24 & 0x80)};
  } else {
    return convert<T>(x);
  }
}

// As XLA does it: to 16 bits by way of float32, to 8 bits at once.
template <typename T>
__device__ __forceinline__ T narrow(double x) {
  float nearest = static_cast<float>(x);
  if constexpr (sizeof(T) == 1) {
    // Rounded to odd, a float can be rounded once more.
    const uint32_t bits = bit_cast<uint32_t>(nearest);
    if (nearest != x && x == x && bits % 2 == 0) {
      nearest = bit_cast<float>(fabsf(nearest) > fabs(x) ? bits - 1 : bits + 1);
    }
  }
  return narrow<T>(nearest);
}

template <typename T, typename Real>
__device__ __forceinline__ float rounded(Real x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return bit_cast<float>(ptx::cvt_rn_bf16x2_f32(static_cast<float>(x), 0.0f));
  } else {
    return wide(narrow<T>(x));
  }
}

// The bits of a number as it is stored as T, and the number of these bits.
template <typename T, typename Real>
__device__ __forceinline__ Bits<T> stored_bits(Real x) {
  if constexpr (std::is_same_v<T, Real>) return bit_cast<Bits<T>>(x);
  if constexpr (!std::is_same_v<T, Real>) return bit_cast<Bits<T>>(narrow<T>(x));
}
template <typename T>
__device__ __forceinline__ auto from_stored_bits(Bits<T> bits) {
  if constexpr (sizeof(T) < 4) {
    return wide(bit_cast<T>(bits));
  } else {
    return bit_cast<T>(bits);
  }
}

// A number of T, one of __half, float and double, with so many bits of exponent and mantissa, if T has more: the
// nearest, infinity where it is too large, 0 where it is subnormal.
template <typename T, int kExponentBits, int kMantissaBits, typename Real>
__device__ __forceinline__ Real reduce_precision(Real x) {
  using Word = Bits<T>;
  constexpr int kOwnExponentBits = sizeof(T) == 2 ? 5 : sizeof(T) == 4 ? 8 : 11;
  constexpr int kOwnMantissaBits = kNumBits<T> - 1 - kOwnExponentBits;
  constexpr Word kOne = 1, kSign = kOne << (kNumBits<T> - 1), kInfinity = kSign - (kOne << kOwnMantissaBits);
  if (x != x) return x;
  const Word bits = stored_bits<T>(x), sign = bits & kSign;
  Word magnitude = bits & (kSign - 1);
  if constexpr (kMantissaBits < kOwnMantissaBits) {
    constexpr Word kLast = kOne << (kOwnMantissaBits - kMantissaBits);
    magnitude += kLast / 2 - 1 + (magnitude & kLast) / kLast;
    magnitude &= ~(kLast - 1);
  }
  if constexpr (kExponentBits < kOwnExponentBits) {
    constexpr Word kOwnBias = (kOne << (kOwnExponentBits - 1)) - 1, kBias = (kOne << (kExponentBits - 1)) - 1;
    const Word exponent = magnitude >> kOwnMantissaBits;
    if (exponent > kOwnBias + kBias) magnitude = kInfinity;
    if (exponent <= kOwnBias - kBias) magnitude = 0;
  }
  return from_stored_bits<T>(magnitude | sign);
}

// Towards zero, the nearest integer that there is for what is too large, 0 for NaN.
template <typename T, typename Real>
__device__ __forceinline__ T to_integer(Real x) {
  if (x != x) return 0;
  if constexpr (sizeof(T) < 4) {
    const int32_t y = to_integer<int32_t>(x);
    return y < kSmallest<T> ? kSmallest<T> : y > kLargest<T> ? kLargest<T> : static_cast<T>(y);
  } else if constexpr (std::is_same_v<Real, float>) {
    if constexpr (std::is_same_v<T, int32_t>) return __float2int_rz(x);
    if constexpr (std::is_same_v<T, uint32_t>) return __float2uint_rz(x);
    if constexpr (std::is_same_v<T, int64_t>) return __float2ll_rz(x);
    if constexpr (std::is_same_v<T, uint64_t>) return __float2ull_rz(x);
  } else {
    if constexpr (std::is_same_v<T, int32_t>) return __double2int_rz(x);
    if constexpr (std::is_same_v<T, uint32_t>) return __double2uint_rz(x);
    if constexpr (std::is_same_v<T, int64_t>) return __double2ll_rz(x);
    if constexpr (std::is_same_v<T, uint64_t>) return __double2ull_rz(x);
  }
}

// Of floats -----------------------------------------------------------------------------------------

// NaN where either is, and -0 is less than 0.
__device__ __forceinline__ float maximum(float x, float y) { return ptx::max_nan_f32(x, y); }
__device__ __forceinline__ float minimum(float x, float y) { return ptx::min_nan_f32(x, y); }
__device__ __forceinline__ double maximum(double x, double y) {
  if (x == y) return bit_cast<double>(bit_cast<uint64_t>(x) & bit_cast<uint64_t>(y));
  return x > y || x != x ? x : y;
}
__device__ __forceinline__ double minimum(double x, double y) {
  if (x == y) return bit_cast<double>(bit_cast<uint64_t>(x) | bit_cast<uint64_t>(y));
  return x < y || x != x ? x : y;
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity<float>(); }
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) < infinity<double>(); }

__device__ __forceinline__ float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
__device__ __forceinline__ double sign(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }

// At most 2 ulp off, as XLA's is.
__device__ __forceinline__ float divide(float x, float y) { return ptx::div_full_f32(x, y); }
__device__ __forceinline__ double divide(double x, double y) { return x / y; }

// The hardware's reciprocal is 1 ulp off at most, and a division would be three times the code. Subnormal results are
// 0: those below -87.3.
__device__ __forceinline__ float logistic(float x) { return ptx::rcp_approx_ftz_f32(1.0f + expf(-x)); }
__device__ __forceinline__ double logistic(double x) { return 1.0 / (1.0 + exp(-x)); }

// The value of dtype T beside x, towards y.
template <typename T, typename Real>
__device__ __forceinline__ Real next_after(Real x, Real y) {
  if (x != x || y != y) return not_a_number<Real>();
  if (x == y) return y;
  const Bits<T> bits = stored_bits<T>(x), sign = Bits<T>(1) << (kNumBits<T> - 1);
  const bool is_zero = (bits & ~sign) == 0, grows = (x < y) == ((bits & sign) == 0);
  if (is_zero) return from_stored_bits<T>(x < y ? 1 : 1 | sign);
  return from_stored_bits<T>(grows ? bits + 1 : bits - 1);
}

// Of integers, which wrap around --------------------------------------------------------------------

// In which the arithmetic of T neither overflows nor becomes that of int.
template <typename T>
using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
__device__ __forceinline__ T add(T x, T y) {
  return static_cast<T>(static_cast<Wrapping<T>>(x) + static_cast<Wrapping<T>>(y));
}
template <typename T>
__device__ __forceinline__ T subtract(T x, T y) {
  return static_cast<T>(static_cast<Wrapping<T>>(x) - static_cast<Wrapping<T>>(y));
}
template <typename T>
__device__ __forceinline__ T multiply(T x, T y) {
  return static_cast<T>(static_cast<Wrapping<T>>(x) * static_cast<Wrapping<T>>(y));
}
// All bits are set of what is divided by 0.
template <typename T>
__device__ __forceinline__ T divide(T x, T y) {
  if (y == 0) return static_cast<T>(-1);
  if (kIsSigned<T> && y == static_cast<T>(-1)) return subtract(T(0), x);
  return static_cast<T>(x / y);
}
template <typename T>
__device__ __forceinline__ T remainder(T x, T y) {
  if (y == 0) return x;
  if (kIsSigned<T> && y == static_cast<T>(-1)) return 0;
  return static_cast<T>(x % y);
}

template <typename T>
__device__ __forceinline__ T maximum(T x, T y) {
  return x > y ? x : y;
}
template <typename T>
__device__ __forceinline__ T minimum(T x, T y) {
  return x < y ? x : y;
}
template <typename T>
__device__ __forceinline__ T sign(T x) {
  return static_cast<T>((x > 0) - (x < 0));
}
template <typename T>
__device__ __forceinline__ T absolute(T x) {
  return x < 0 ? subtract(T(0), x) : x;
}

// By more bits than there are, nothing is left, or the sign.
template <typename T>
__device__ __forceinline__ T shift_left(T x, T count) {
  return static_cast<Bits<T>>(count) < kNumBits<T> ? static_cast<T>(static_cast<Wrapping<T>>(x) << count) : T(0);
}
template <typename T>
__device__ __forceinline__ T shift_right_logical(T x, T count) {
  return static_cast<Bits<T>>(count) < kNumBits<T> ? static_cast<T>(static_cast<Bits<T>>(x) >> count) : T(0);
}
template <typename T>
__device__ __forceinline__ T shift_right_arithmetic(T x, T count) {
  const int places = static_cast<Bits<T>>(count) < kNumBits<T> ? static_cast<int>(count) : kNumBits<T> - 1;
  // 8-bit and 16-bit numbers keep their sign in an int.
  if constexpr (sizeof(T) == 8) return static_cast<T>(static_cast<int64_t>(x) >> places);
  if constexpr (sizeof(T) < 8) {
    constexpr int kUnused = 32 - kNumBits<T>;
    return static_cast<T>((static_cast<int32_t>(static_cast<uint32_t>(x) << kUnused) >> kUnused) >> places);
  }
}

template <typename T>
__device__ __forceinline__ T population_count(T x) {
  if constexpr (sizeof(T) == 8) return static_cast<T>(__popcll(static_cast<uint64_t>(x)));
  return static_cast<T>(__popc(static_cast<Bits<T>>(x)));
}
template <typename T>
__device__ __forceinline__ T count_leading_zeros(T x) {
  if constexpr (sizeof(T) == 8) return static_cast<T>(__clzll(static_cast<int64_t>(x)));
  return static_cast<T>(__clz(static_cast<int32_t>(static_cast<Bits<T>>(x))) - (32 - kNumBits<T>));
}

// The hash of jax.random's default generator: Threefry with 2 words of 32 bits and 20 rounds.
// Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
struct Words {
  uint32_t first, second;
};
__device__ __forceinline__ Words threefry2x32(uint32_t key0, uint32_t key1, uint32_t x0, uint32_t x1) {
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDA};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 += keys[0];
  x1 += keys[1];
#pragma unroll
  for (int group = 0; group < 5; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int rotation = kRotations[group % 2][i];
      x0 += x1;
      x1 = (x1 << rotation | x1 >> (32 - rotation)) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + group + 1;
  }
  return {x0, x1};
}

}  // namespace tcgemm::elementwise
