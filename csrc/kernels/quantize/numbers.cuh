// Numbers of 16 and 32 bits that become ones of 8.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/quantize/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::quantize {

// pack(x, y, z, w): four numbers, rounded, the first in the lowest byte. None is beyond the largest number by so much
// that it would not be rounded to it.
template <typename Q>
struct Format;
template <>
struct Format<ptx::E4M3> {
  static constexpr float kLargest = 448.0f;
  static __device__ __forceinline__ uint32_t pack(float x, float y, float z, float w) {
    // mutant: order_of_bytes
    return ptx::cvt_rn_satfinite_e4m3x2_f32(w, z) << 16 | ptx::cvt_rn_satfinite_e4m3x2_f32(y, x);
  }
};
template <>
struct Format<ptx::E5M2> {
  static constexpr float kLargest = 57344.0f;
  static __device__ __forceinline__ uint32_t pack(float x, float y, float z, float w) {
    return ptx::cvt_rn_satfinite_e5m2x2_f32(w, z) << 16 | ptx::cvt_rn_satfinite_e5m2x2_f32(y, x);
  }
};
template <>
struct Format<int8_t> {
  static constexpr float kLargest = 127.0f;
  static __device__ __forceinline__ uint32_t pack(float x, float y, float z, float w) {
    const uint32_t low = __byte_perm(ptx::cvt_rni_s32_f32(x), ptx::cvt_rni_s32_f32(y), 0x0040);
    return __byte_perm(low, __byte_perm(ptx::cvt_rni_s32_f32(z), ptx::cvt_rni_s32_f32(w), 0x0040), 0x5410);
  }
};

// Magnitudes are compared as integers, in whose order NaN is the largest. Those of 16 bits are the upper half of one;
// what the lower half holds decides nothing.
template <typename X>
__device__ __forceinline__ float number_of(uint32_t magnitude) {
  if constexpr (sizeof(X) == 4) {
    return __uint_as_float(magnitude);
  } else {
    const auto bits = static_cast<uint16_t>(magnitude >> 16);
    X x;
    memcpy(&x, &bits, sizeof(x));
    return convert<float>(x);
  }
}

template <typename X, typename Q>
__device__ __forceinline__ float scale_of(uint32_t largest) {
  constexpr float kInverse = 1.0f / Format<Q>::kLargest, kSmallestNormal = 1.17549435e-38f;  // mutant: scale_of_zeros
  return ptx::max_nan_f32(number_of<X>(largest) * kInverse, kSmallestNormal);                // mutant: nan_is_no_number
}

// What elements are multiplied by. XLA's division is this one, so that bits are the same.
__device__ __forceinline__ float inverse_of(float scale) { return ptx::div_full_f32(1.0f, scale); }

// Neighbors of a row, as they lie in memory. kAligned: in whole vectors.
template <typename X, bool kAligned>
struct Vector {
  static constexpr int kWords = kVector * static_cast<int>(sizeof(X)) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(X) == 4) {
      return __uint_as_float(words[i]);
    } else {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));  // mutant: halves_of_a_word
      X x;
      memcpy(&x, &bits, sizeof(x));
      return convert<float>(x);
    }
  }

  // The first `count` elements of a row's rest; zeros after them.
  __device__ __forceinline__ void load(const X* from, int32_t count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if constexpr (kAligned) {
      if (count <= 0) return;
#pragma unroll
      for (int i = 0; i < kWords; i += 4) ptx::ld_global_v4_u32(words + i, reinterpret_cast<const uint32_t*>(from) + i);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= count) continue;
        if constexpr (sizeof(X) == 4) {
          words[i] = ptx::ld_global<uint32_t>(from + i);
        } else {
          words[i / 2] |= static_cast<uint32_t>(ptx::ld_global<uint16_t>(from + i)) << 16 * (i % 2);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t magnitude(int i) const {
    if constexpr (sizeof(X) == 4) return words[i] & 0x7FFFFFFFu;
    return (i % 2 != 0 ? words[i / 2] : words[i / 2] << 16) & 0x7FFFFFFFu;
  }

  __device__ __forceinline__ uint32_t largest() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) found = max(found, magnitude(i));
    return found;
  }

  // Multiplied by the inverse of a scale, rounded and stored; of a row's rest so many.
  template <typename Q>
  __device__ __forceinline__ void store(float inverse, uint8_t* to, int32_t count) const {
    float q[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) q[i] = (*this)[i] * inverse;
    const uint32_t packed[2] = {Format<Q>::pack(q[0], q[1], q[2], q[3]), Format<Q>::pack(q[4], q[5], q[6], q[7])};
    if constexpr (kAligned) {
      if (count > 0) ptx::st_global_v2_u32(to, packed);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i < count) to[i] = static_cast<uint8_t>(packed[i / 4] >> 8 * (i % 4));
      }
    }
  }
};

}  // namespace tcgemm::quantize
