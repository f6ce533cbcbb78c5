// Conversion and stores of adjacent values.
#pragma once

#include <cstdint>
#include <cstring>

#include "ptx/global_memory.cuh"
#include "tile/numeric.cuh"

namespace tcgemm {

// Converts adjacent values and stores them in instructions of 16 bytes, or of all bytes they have;
// `target` is aligned to that. In PTX, because the compiler splits stores of a packed array.
template <typename Out, int kCount, typename Acc>
__device__ __forceinline__ void store_vectors(const Acc (&values)[kCount], Out* target) {
  constexpr int kBytes = kCount * sizeof(Out) < 16 ? kCount * sizeof(Out) : 16;
  constexpr int kPerVector = kBytes / sizeof(Out);
  static_assert(kCount % kPerVector == 0, "whole vectors");
#pragma unroll
  for (int i = 0; i < kCount; i += kPerVector) {
    Out elements[kPerVector];
#pragma unroll
    for (int j = 0; j < kPerVector; ++j) elements[j] = convert<Out>(values[i + j]);
    if constexpr (kBytes == 16) {
      uint32_t words[4];
      memcpy(words, elements, kBytes);
      ptx::st_global_v4_u32(target + i, words);
    } else if constexpr (kBytes == 8) {
      uint32_t words[2];
      memcpy(words, elements, kBytes);
      ptx::st_global_v2_u32(target + i, words);
    } else {
      static_assert(kPerVector == 1, "vectors of 8 or 16 bytes");
      target[i] = elements[0];
    }
  }
}

}  // namespace tcgemm
