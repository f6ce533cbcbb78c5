// Sine, cosine and tangent of a float, at most 1.6 ulp off (tangent 3.6), without a stack frame.
//
// CUDA's own reduce arguments beyond 105615 in an array of local memory. A kernel that holds accumulators in registers
// spills them around that, also where no argument is so large.
#pragma once

#include <cstdint>
#include <cstring>

#include "ptx/math.cuh"

namespace tcgemm::elementwise {

// |x| = rest + number * pi / 2, with rest in about [-pi / 4, pi / 4].
struct Quadrant {
  float rest;
  uint32_t number;
};

namespace trigonometry {

// Payne and Hanek, Radian reduction for trigonometric functions (1983): of x, beyond 2^16, times 2 / pi only the bits
// that are a quadrant, and 62 below them.
__device__ __forceinline__ Quadrant reduce_large(float x) {
  // The first bits of 2 / pi, after a word of zeros.
  constexpr uint32_t kTwoOverPi[8] = {0,          0xA2F9836E, 0x4E441529, 0xFC2757D1,
                                      0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB};
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t mantissa = (bits & 0x7FFFFF) | 0x800000;
  // x = mantissa * 2^exponent. The first bit that counts is worth 2^(1 - exponent).
  const int first = static_cast<int>(bits >> 23) - 150 + 30;
  uint32_t window[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    uint64_t both = 0;
    // Indices that are known keep the words out of memory.
#pragma unroll
    for (int word = 0; word < 5; ++word) {
      const uint64_t own = uint64_t{kTwoOverPi[word + i]} << 32 | kTwoOverPi[word + i + 1];
      both = word == first / 32 ? own : both;
    }
    window[i] = static_cast<uint32_t>(both << first % 32 >> 32);
  }
  const uint64_t low = uint64_t{mantissa} * window[2];
  const uint64_t middle = uint64_t{mantissa} * window[1] + (low >> 32);
  const uint32_t high = mantissa * window[0] + static_cast<uint32_t>(middle >> 32);
  const uint64_t turns = uint64_t{high} << 32 | static_cast<uint32_t>(middle);
  // The nearest quadrant: what is left has a sign.
  const int64_t signed_part = static_cast<int64_t>(turns << 2);
  const double exact = static_cast<double>(signed_part) * 8.5153039502163873e-20;  // pi / 2 * 2^-64
  return {static_cast<float>(exact), (high >> 30) + (signed_part < 0 ? 1u : 0u)};
}

// Cody and Waite's reduction. The first multiplication is exact, for quadrants have at most 17 bits.
__device__ __forceinline__ Quadrant reduce(float x) {
  x = fabsf(x);
  if (x > 105615.0f) {
    if (x <= 3.40282347e38f) return reduce_large(x);
    return {x - x, 0};  // NaN of infinity
  }
  constexpr float kHalfPi[3] = {1.5707963705e+0f, -4.3711388287e-8f, -1.7151245100e-15f};
  const float quadrants = rintf(x * 0.636619772f);
  float rest = fmaf(-quadrants, kHalfPi[0], x);
  rest = fmaf(-quadrants, kHalfPi[1], rest);
  rest = fmaf(-quadrants, kHalfPi[2], rest);
  return {rest, static_cast<uint32_t>(__float2int_rz(quadrants))};
}

// The sine of x, or the cosine of an odd number of quadrants: Moshier, Cephes, sinf.c.
__device__ __forceinline__ float of_quadrant(Quadrant x) {
  const bool is_cosine = x.number & 1;
  const float square = x.rest * x.rest;
  float sum = fmaf(is_cosine ? 2.443315711809948e-5f : -1.9515295891e-4f, square,
                   is_cosine ? -1.388731625493765e-3f : 8.3321608736e-3f);
  sum = fmaf(sum, square, is_cosine ? 4.166664568298827e-2f : -1.6666654611e-1f);
  const float y = fmaf(sum, square * (is_cosine ? square : x.rest), is_cosine ? fmaf(-0.5f, square, 1.0f) : x.rest);
  return x.number & 2 ? -y : y;
}

}  // namespace trigonometry

__device__ __forceinline__ float sine(float x) {
  // By the sign of x, -0 too.
  return copysignf(1.0f, x) * trigonometry::of_quadrant(trigonometry::reduce(x));
}
__device__ __forceinline__ float cosine(float x) {
  Quadrant reduced = trigonometry::reduce(x);
  ++reduced.number;
  return trigonometry::of_quadrant(reduced);
}
__device__ __forceinline__ float tangent(float x) {
  Quadrant reduced = trigonometry::reduce(x);
  const float sine = trigonometry::of_quadrant(reduced);
  ++reduced.number;
  return copysignf(1.0f, x) * ptx::div_full_f32(sine, trigonometry::of_quadrant(reduced));
}
__device__ __forceinline__ double sine(double x) { return sin(x); }
__device__ __forceinline__ double cosine(double x) { return cos(x); }
__device__ __forceinline__ double tangent(double x) { return tan(x); }

}  // namespace tcgemm::elementwise
