// Splits an operand into terms (core/split_problem.h). Bound by memory: read once, each term written once for each
// product that takes it.
//
// A thread has 16 bytes of a row of D, and writes them for every product: neighbors of a warp write whole lines.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/split/params.cuh"
#include "ptx/global_memory.cuh"

namespace tcgemm::split {

// How a number of the type D is cut out of one of float32: it has the exponent's bits and so many of the mantissa.
template <typename Out>
inline constexpr int kMantissaBits = sizeof(Out) == 2 ? 7 : 10;

// To the nearest number with so many bits of mantissa, to the even one of two; x is finite. Its size may grow over the
// largest number of float32, but not from below the largest one with those bits.
template <int kBits>
__device__ __forceinline__ float rounded(float x) {
  constexpr int kDropped = 23 - kBits;
  const uint32_t bits = __float_as_uint(x), is_odd = bits >> kDropped & 1;  // mutant: half_is_rounded_up
  // mutant: rounded_down
  return __uint_as_float((bits + ((1u << (kDropped - 1)) - 1) + is_odd) & ~((1u << kDropped) - 1));
}

template <int kCount>
constexpr int largest_of(const int (&numbers)[kCount]) {
  int largest = 0;
  for (int i = 0; i < kCount; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
  return largest;
}

// The terms of some numbers of a row, as words of D.
template <typename Out, int kTerms>
struct Terms {
  static constexpr int kVector = 16 / sizeof(Out);

  uint32_t words[kTerms][4];
  uint32_t first[4];  // term 0, and what is not finite

  __device__ __forceinline__ explicit Terms(const float (&x)[kVector]) {
    constexpr int kBits = kMantissaBits<Out>;
    constexpr uint32_t kLargestBits = 0x7F7FFFFFu & ~((1u << (23 - kBits)) - 1);
    const float largest = __uint_as_float(kLargestBits);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t bits = __float_as_uint(x[i]), magnitude = bits & 0x7FFFFFFFu;
      const bool is_finite = magnitude < 0x7F800000u;
      float rest = is_finite ? x[i] : 0.0f;  // mutant: infinity_is_taken_by_all
      // A NaN of which the bits that remain are none of the mantissa would be an infinity.
      uint32_t first_bits = magnitude > 0x7F800000u ? bits | 0x00400000u : bits;  // mutant: nan_becomes_infinite
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        // What is above the largest one must not become infinite.
        // mutant: largest_becomes_infinite
        const float own = rounded<kBits>(term == 0 ? fminf(fmaxf(rest, -largest), largest) : rest);
        rest -= own;  // mutant: rest_is_kept
        put(words[term], i, __float_as_uint(own));
        if (term == 0 && is_finite) first_bits = __float_as_uint(own);
      }
      put(first, i, first_bits);
    }
  }

  // The vector's number i is now the upper bits of a float, or all of them.
  static __device__ __forceinline__ void put(uint32_t (&to)[4], int i, uint32_t bits) {
    if constexpr (sizeof(Out) == 2) {
      to[i / 2] = i % 2 == 0 ? bits >> 16 : to[i / 2] | (bits & 0xFFFF0000u);  // mutant: neighbors_exchanged
    } else {
      to[i] = bits;
    }
  }

  // Writes a term, negated if that is asked for; the last product's has what is not finite.
  __device__ __forceinline__ void store(Out* to, int term, bool is_last, bool negated = false) const {
    constexpr uint32_t kSigns = sizeof(Out) == 2 ? 0x80008000u : 0x80000000u;
    const uint32_t (&from)[4] = is_last ? first : words[term];  // mutant: infinity_is_lost
    uint32_t signed_words[4];
#pragma unroll
    // mutant: sign_of_the_right_one
    for (int i = 0; i < 4; ++i) signed_words[i] = negated ? from[i] ^ kSigns : from[i];
    ptx::st_global_v4_u32(to, signed_words);
  }
};

// Neighbors of a row; zeros where `count` ends. Of numbers that are complex, re and im lie side by side.
template <int kCount, bool kAligned>
__device__ __forceinline__ void load(float (&x)[kCount], const float* from, int32_t count) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0;
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      if (i >= count) continue;
      uint32_t words[4];
      ptx::ld_global_v4_u32(words, from + i);  // mutant: half_a_vector_twice
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = __uint_as_float(words[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) x[i] = __uint_as_float(ptx::ld_global<uint32_t>(from + i));
    }
  }
}

// kAligned: rows of X are 16-byte aligned. kNumbers: the term that each product takes.
template <typename Out, Operand kOperand, bool kAligned, int... kNumbers>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Params params) {
  constexpr int kVector = 16 / sizeof(Out), kProducts = sizeof...(kNumbers);
  constexpr int kTaken[] = {kNumbers...};
  constexpr bool kIsComplex = kOperand != Operand::kReal;
  constexpr int kComponents = kIsComplex ? 2 : 1;
  constexpr int kTerms = 1 + largest_of(kTaken);
  const int64_t idx = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (idx >= params.num_vectors) return;
  const auto vector_idx = static_cast<int32_t>(idx);
  const int32_t row = params.vectors.divide(vector_idx), column = (vector_idx - row * params.row_vectors) * kVector;
  const int32_t outer_middle = params.inner.divide(row), inner = row - outer_middle * params.num_inner;
  // mutant: extent_of_the_middle
  const int32_t outer = params.middle.divide(outer_middle), middle = outer_middle - outer * params.num_middle;

  // mutant: depth_is_not_filled, depth_of_the_last_form
  const bool is_inside = middle < params.x_middle && inner < params.x_inner;
  const int64_t x_row = (static_cast<int64_t>(outer) * params.x_middle + middle) * params.x_inner + inner;
  const float* from = static_cast<const float*>(params.x) + (x_row * params.columns + column) * kComponents;
  float x[kVector * kComponents];
  // mutant: number_of_the_next_row
  load<kVector * kComponents, kAligned>(x, from, is_inside ? (params.columns - column) * kComponents : 0);

  Out* to =
      static_cast<Out*>(params.d) + outer * params.d_outer + middle * params.d_middle + inner * params.d_inner + column;
  if constexpr (!kIsComplex) {
    const Terms<Out, kTerms> terms(x);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) terms.store(to + i * params.d_term, kTaken[i], i == kProducts - 1);
  } else {
    float re[kVector], im[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) re[i] = x[2 * i], im[i] = x[2 * i + 1];  // mutant: imaginary_part_twice
    const Terms<Out, kTerms> of_re(re), of_im(im);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const bool is_last = i == kProducts - 1;
      Out* const pair = to + 2 * i * params.d_term;
      of_re.store(pair, kTaken[i], is_last);
      // mutant: sign_of_the_left_one
      of_im.store(pair + params.d_term, kTaken[i], is_last, kOperand == Operand::kRight);
      if constexpr (kOperand == Operand::kRight) {
        of_im.store(pair + params.d_component, kTaken[i], is_last);  // mutant: component_of_another_row
        of_re.store(pair + params.d_component + params.d_term, kTaken[i], is_last);
      }
    }
  }
}

}  // namespace tcgemm::split
