// The weight of a packed problem as an array of n rows of k: what products with many rows multiply. Bound by memory: a
// warp has a chunk, of which each lane has eight neighbors of k of two columns at a time, which it stores as 16 bytes.
#pragma once

#include <cstdint>

#include "kernels/packed/fragments.cuh"
#include "kernels/packed/geometry.h"
#include "kernels/packed/params.cuh"
#include "ptx/global_memory.cuh"
#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::packed {

// Element e of a pair of a step, as fragments.cuh orders them in a lane's 16 bytes, without its scale.
template <int kBits, PackedCode kCode>
__device__ __forceinline__ float value_of(const uint32_t (&words)[4], int step, int pair, int e, float zero,
                                          const float* table) {
  if constexpr (kCode == PackedCode::kE2M1) {
    uint32_t expanded[4];
    expand_float4<__nv_bfloat16>(words, step, expanded);
    const uint32_t bits = e == 0 ? expanded[pair] << 16 : expanded[pair] & 0xFFFF0000u;
    return rebias<kCode>(__uint_as_float(bits));
  } else if constexpr (kCode == PackedCode::kTable) {
    return table[words[step] >> (8 * pair + 4 * e) & 15];
  } else {
    uint32_t u;
    if constexpr (kBits == 4) {
      u = words[step] >> (4 * pair + 16 * e) & 15;
    } else {
      u = words[2 * step + pair / 2] >> (8 * (pair % 2) + 16 * e) & 255;
    }
    if constexpr (kCode == PackedCode::kInteger) return static_cast<float>(u) - zero;
    if constexpr (kCode != PackedCode::kInteger) return float8_value<kCode>(u);
  }
}

template <int kBits, int kCode, typename X, typename Scale>
__global__ void __launch_bounds__(kWeightThreads) write_weight(const __grid_constant__ WeightParams params) {
  constexpr int kChunkK = kBits == 4 ? 64 : 32;
  const int64_t chunk = (int64_t{blockIdx.x} * kWeightThreads + threadIdx.x) / 32;
  if (chunk >= params.num_chunks) return;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int64_t tile = chunk / params.chunks;
  const int32_t first_k = static_cast<int32_t>(chunk - tile * params.chunks) * kChunkK;
  uint32_t words[4];
  ptx::ld_global_v4_u32(words, params.values + chunk * kChunkBytes + lane * 16);
#pragma unroll
  for (int block = 0; block < kChunkK / kBlockK; ++block) {
    const int32_t k = first_k + block * kBlockK + c * 8;
    if (k >= params.k) continue;
    const int64_t scale_idx = (tile * params.groups + k / params.group_size) * kTile + g * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = float_of(static_cast<const Scale*>(params.scales)[scale_idx + r]);
      const float zero = params.zero_points != nullptr ? params.zero_points[scale_idx + r] : params.zero;
      float numbers[8];
      const float column_scale = params.column_scales == nullptr ? 1 : params.column_scales[tile * kTile + g * 2 + r];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int step = i / 4, half = i / 2 % 2, e = i % 2;
        const float value =
            value_of<kBits, PackedCode{kCode}>(words, kSteps * block + step, 2 * half + r, e, zero, params.table);
        numbers[i] = value * scale * column_scale;
      }
      store_vectors(numbers, static_cast<X*>(params.d) + (tile * kTile + r * 8 + g) * params.k + k);
    }
  }
}

}  // namespace tcgemm::packed
