// What becomes of a sum of partial products (split_reduction_kernel.cuh), with what a launch tells of it.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::split_reduction {

inline constexpr int kThreads = 256;

// D = alpha * sums + beta * C in int32, which wraps around.
struct Integers {
  int32_t alpha, beta;
  const int32_t* c;
  int32_t* d;
  bool vectors;

  template <int kCount>
  __device__ __forceinline__ void store(int32_t (&sums)[kCount], int64_t first, int count) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[i] *= alpha;
      if (beta != 0 && i < count) sums[i] += beta * c[first + i];
    }
    if (vectors && count == kCount) return store_vectors(sums, d + first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) d[first + i] = sums[i];
    }
  }
};

// The same of floating-point types.
struct Floats {
  FloatType type;
  float alpha, beta;
  const void* c;
  void* d;
  bool vectors;  // C and D start on 16 bytes

  template <int kCount>
  __device__ __forceinline__ void store(float (&sums)[kCount], int64_t first, int count) const {
    visit_float(type, [&](auto tag) {
      using T = decltype(tag);
      const T* const source = static_cast<const T*>(c) + first;
      T* const target = static_cast<T*>(d) + first;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] *= alpha;
        if (beta != 0.0f && i < count) sums[i] += beta * convert<float>(source[i]);
      }
      if constexpr (kCount * sizeof(T) % 8 == 0) {
        if (vectors && count == kCount) return store_vectors(sums, target);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < count) target[i] = convert<T>(sums[i]);
      }
    });
  }
};

}  // namespace tcgemm::split_reduction
