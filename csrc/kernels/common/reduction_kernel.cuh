// Reductions over one mode of a packed array (outer, reduced, inner).
//
//   inner == 1   rows_kernel: a warp for each row, or a CTA for each where rows are long
//   inner > 1    columns_kernel: `threads_inner` threads of a CTA along the contiguous inner mode; the other threads
//                reduce other indices of the same columns, and partial results are combined in shared memory
//
// Where outer * inner is too small to fill the device, the reduced mode is split: each split is reduced into the
// workspace, in float32 (float64 for float64), and a second launch reduces the splits. A CTA has 256 threads; loads
// have 16 bytes where every row is aligned to them. There are no atomics.
#pragma once

#include <cstdint>

#include "kernels/common/reduction_params.cuh"
#include "tile/numeric.cuh"
#include "tile/reduction.cuh"

namespace tcgemm::reduction {

inline constexpr int kUnroll = 4;  // loads in flight for each thread

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <typename In, int kCount>
struct alignas(kCount * sizeof(In)) Pack {
  In values[kCount];
};

template <typename In, typename Acc, int kCount>
__device__ __forceinline__ void accumulate(Acc (&acc)[kCount], const Pack<In, kCount>& pack, const Reducer<Acc>& op) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op(acc[i], convert<Acc>(pack.values[i]));
}

__device__ __forceinline__ void store(void* out, int64_t index, double value, FloatType) {
  static_cast<double*>(out)[index] = value;
}
__device__ __forceinline__ void store(void* out, int64_t index, float value, FloatType type) {
  switch (type) {
    case FloatType::kF16: static_cast<__half*>(out)[index] = convert<__half>(value); break;
    case FloatType::kBF16: static_cast<__nv_bfloat16*>(out)[index] = convert<__nv_bfloat16>(value); break;
    case FloatType::kF32: static_cast<float*>(out)[index] = value; break;
  }
}

// Reduces the packs first, first + step, ... below last into `acc`; neighbors are `stride` packs apart in memory.
template <typename In, typename Acc, int kCount>
__device__ __forceinline__ void accumulate_strided(Acc (&acc)[kCount], const Pack<In, kCount>* in, int64_t first,
                                                   int64_t last, int64_t step, int64_t stride, const Reducer<Acc>& op) {
  int64_t i = first;
  for (; i + (kUnroll - 1) * step < last; i += kUnroll * step) {
    Pack<In, kCount> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packs[u] = in[(i + u * step) * stride];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) accumulate<In>(acc, packs[u], op);
  }
  for (; i < last; i += step) accumulate<In>(acc, in[i * stride], op);
}

template <typename In, int kCount>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const void* __restrict__ in, void* __restrict__ out, const __grid_constant__ Pass pass,
                typename Accumulator<In>::type infinity) {
  using Acc = typename Accumulator<In>::type;
  __shared__ Acc partials[kThreads / 32];
  const Reducer<Acc> op{pass.op};
  const int threads_per_row = static_cast<int>(pass.warps_per_row) * 32;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / threads_per_row) + threadIdx.x / threads_per_row;
  // All threads of a row return together, so that the reductions of warps and CTAs below are convergent.
  if (index >= pass.outer * pass.splits) return;
  const int64_t row = index / pass.splits, split = index % pass.splits;
  const int64_t first = split * pass.elements_per_split;
  const int64_t last = min(first + pass.elements_per_split, pass.reduced);
  Acc acc[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op.identity(infinity);
  const auto* packs =
      reinterpret_cast<const Pack<In, kCount>*>(static_cast<const In*>(in) + row * pass.reduced + first);
  accumulate_strided<In>(acc, packs, threadIdx.x % threads_per_row, (last - first) / kCount, threads_per_row, 1, op);
  Acc total = acc[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) total = op(total, acc[i]);
  total = threads_per_row == 32 ? warp_reduce(total, op)
                                : block_reduce<kThreads>(total, op.identity(infinity), op, partials);
  if (threadIdx.x % threads_per_row == 0) store(out, index, total, pass.out);
}

template <typename In, int kCount>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const void* __restrict__ in, void* __restrict__ out, const __grid_constant__ Pass pass,
                   typename Accumulator<In>::type infinity) {
  using Acc = typename Accumulator<In>::type;
  __shared__ Acc partials[kThreads][kCount];
  const Reducer<Acc> op{pass.op};
  int64_t index = blockIdx.x;
  const int64_t tile_idx = index % pass.inner_tiles;
  index /= pass.inner_tiles;
  const int64_t outer_idx = index / pass.splits, split = index % pass.splits;
  const int inner_thread = static_cast<int>(threadIdx.x) % pass.threads_inner;
  const int outer_thread = static_cast<int>(threadIdx.x) / pass.threads_inner,
            outer_threads = kThreads / pass.threads_inner;
  const int64_t column = (tile_idx * pass.threads_inner + inner_thread) * kCount;
  const bool inside = column < pass.inner;
  Acc acc[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op.identity(infinity);
  if (inside) {
    const int64_t first = split * pass.elements_per_split;
    const int64_t last = min(first + pass.elements_per_split, pass.reduced);
    const auto* packs = reinterpret_cast<const Pack<In, kCount>*>(
        static_cast<const In*>(in) + (outer_idx * pass.reduced + first) * pass.inner + column);
    accumulate_strided<In>(acc, packs, outer_thread, last - first, outer_threads, pass.inner / kCount, op);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) partials[threadIdx.x][i] = acc[i];
  for (int offset = outer_threads / 2; offset > 0; offset /= 2) {
    __syncthreads();
    if (outer_thread < offset) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        acc[i] = op(acc[i], partials[threadIdx.x + offset * pass.threads_inner][i]);
        partials[threadIdx.x][i] = acc[i];
      }
    }
  }
  if (inside && outer_thread == 0) {
    const int64_t target = (outer_idx * pass.splits + split) * pass.inner + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(out, target + i, acc[i], pass.out);
  }
}

}  // namespace tcgemm::reduction
