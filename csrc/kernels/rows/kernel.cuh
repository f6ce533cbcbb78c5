// The kernels of core/rows_problem.h. Bound by memory: rows move in 16-byte loads where they lie on such
// boundaries, element by element elsewhere. Sums are kept in float32 and in the order of the pairs.
#pragma once

#include <cstdint>

#include "kernels/rows/params.cuh"
#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::rows {

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T values[kCount];
};

template <typename T, int kCount, int kPacks>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumsParams params) {
  constexpr int kUnroll = kPacks > 1 ? 1 : 4;
  const int32_t lanes = kPacks > 1 ? kWideLanes : params.lanes;
  const int32_t block = blockIdx.x / params.column_blocks, column_block = blockIdx.x - block * params.column_blocks;
  const int32_t target = block * (kThreads / lanes) + threadIdx.x / lanes;
  const int32_t first_pack = column_block * lanes * kPacks + threadIdx.x % lanes;
  if (target >= params.targets) return;
  const int32_t begin = min(max(params.starts[target], 0), params.pairs);
  const int32_t end = min(max(params.starts[target + 1], begin), params.pairs);
  const auto* a = static_cast<const Pack<T, kCount>*>(params.a) + first_pack;
  const auto has = [&](int i) { return first_pack + i * lanes < params.packs; };
  float sums[kPacks][kCount] = {};
  for (int32_t first = begin; first < end; first += kUnroll) {
    Pack<T, kCount> rows[kUnroll][kPacks];
    float weights[kUnroll];
    bool inside[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t row = first + u < end ? params.indices[first + u] : -1;
      inside[u] = row >= 0 && row < params.a_rows;
      if (!inside[u]) continue;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (has(i)) rows[u][i] = a[int64_t{row} * params.packs + i * lanes];
      }
      weights[u] = params.weights == nullptr ? 1.0f : params.weights[first + u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!inside[u]) continue;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int v = 0; v < kCount; ++v) sums[i][v] += weights[u] * convert<float>(rows[u][i].values[v]);
      }
    }
  }
  T* d = static_cast<T*>(params.d) + (int64_t{target} * params.packs + first_pack) * kCount;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (has(i)) store_vectors(sums[i], d + i * lanes * kCount);
  }
}

// A warp a pair.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) multiply_rows(const __grid_constant__ DotsParams params) {
  const int64_t pair = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (pair >= params.pairs) return;
  const int32_t i = params.indices[pair], j = params.b_indices[pair];
  float sum = 0.0f;
  if (i >= 0 && i < params.a_rows && j >= 0 && j < params.b_rows) {
    const auto* x = static_cast<const Pack<T, kCount>*>(params.a) + int64_t{i} * params.packs;
    const auto* y = static_cast<const Pack<T, kCount>*>(params.b) + int64_t{j} * params.packs;
#pragma unroll 4
    for (int32_t pack = threadIdx.x % 32; pack < params.packs; pack += 32) {
      const Pack<T, kCount> p = x[pack], q = y[pack];
#pragma unroll
      for (int v = 0; v < kCount; ++v) sum += convert<float>(p.values[v]) * convert<float>(q.values[v]);
    }
  }
#pragma unroll
  for (int shift = 16; shift > 0; shift /= 2) sum += __shfl_xor_sync(~0u, sum, shift);
  if (threadIdx.x % 32 == 0) params.d[pair] = sum;
}

}  // namespace tcgemm::rows
