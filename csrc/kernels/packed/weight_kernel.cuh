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

template <int kBits, int kCode, typename X, typename Scale>
__global__ void __launch_bounds__(kWeightThreads) write_weight(const __grid_constant__ WeightParams params) {
  constexpr PackedCode kOwnCode{kCode};
  constexpr bool kTable = kOwnCode == PackedCode::kTable;
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
        uint32_t u;
        if constexpr (kBits == 4) {
          const int pair = 2 * half + r;
          u = words[2 * block + step] >> (kTable ? 8 * pair + 4 * e : 4 * pair + 16 * e) & 15;
        } else {
          u = words[2 * step + half] >> (8 * r + 16 * e) & 255;
        }
        float value;
        if constexpr (kTable) {
          value = params.table[u];
        } else if constexpr (kOwnCode == PackedCode::kInteger) {
          value = static_cast<float>(u) - zero;
        } else {
          value = float_value<kOwnCode>(u);
        }
        numbers[i] = value * scale * column_scale;
      }
      store_vectors(numbers, static_cast<X*>(params.d) + (tile * kTile + r * 8 + g) * params.k + k);
    }
  }
}

}  // namespace tcgemm::packed
