// Adds up the partial products of split K: see split_reduction.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/split_reduction_params.cuh"
#include "ptx/early_start.cuh"

namespace tcgemm::split_reduction {

// Loads kAtOnce partial products, as far as there are so many, before it adds the first: a loop that adds each
// one waits for memory each time.
template <int kAtOnce, typename Partial, int kCount>
__device__ __forceinline__ void add_at_once(Partial (&sums)[kCount], const Partial* source, int64_t elements, int first,
                                            int num_splits, int step) {
  uint4 words[kAtOnce][kCount / 4];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int split = first + i * step;
    if (split >= num_splits) break;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      words[i][j] = *reinterpret_cast<const uint4*>(source + split * elements + j * 4);
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (first + i * step >= num_splits) break;
    Partial values[kCount];
    memcpy(values, words[i], sizeof(words[i]));
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += values[j];
  }
}

// Adds up every `step`-th partial product, from the one at `source` on; there are `elements` in each.
template <typename Partial, int kCount>
__device__ __forceinline__ void add_splits(Partial (&sums)[kCount], const Partial* source, int64_t elements, int first,
                                           int num_splits, int step, int count, bool vectors) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = 0;
  if (vectors) {
    constexpr int kFew = 16 / kCount, kMany = 32 / kCount;
    if (num_splits <= kFew * step) return add_at_once<kFew>(sums, source, elements, first, num_splits, step);
#pragma unroll 1
    for (int split = first; split < num_splits; split += kMany * step) {
      add_at_once<kMany>(sums, source, elements, split, num_splits, step);
    }
  } else {
#pragma unroll 1
    for (int split = first; split < num_splits; split += step) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < count) sums[i] += source[split * elements + i];
      }
    }
  }
}

// All of D as one row of `elements`, kCount of them a thread. `vectors`: splits start on 16 bytes. Each of kGroups
// threads adds up every kGroups-th partial product of the same elements, and the groups' sums are added in order: more
// groups put more blocks to work on a small D.
template <typename Partial, typename Epilogue, int kGroups, int kCount>
__global__ void __launch_bounds__(kThreads) reduce(const void* partials, int64_t elements, int num_splits, bool vectors,
                                                   const __grid_constant__ Epilogue epilogue) {
  constexpr int kAcross = kThreads / kGroups;
  struct alignas(16) Sums {
    Partial values[kCount];
  };
  __shared__ Sums group_sums[kGroups > 1 ? kGroups : 1][kGroups > 1 ? kAcross : 1];
  const int position = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kAcross + position) * kCount;
  const int count = first < elements ? static_cast<int>(min(elements - first, int64_t{kCount})) : 0;
  ptx::start_dependents();
  ptx::wait_for_previous();

  Partial sums[kCount];
  add_splits(sums, static_cast<const Partial*>(partials) + first, elements, group, num_splits, kGroups, count,
             vectors && count == kCount);
  if constexpr (kGroups > 1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) group_sums[group][position].values[i] = sums[i];
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < kGroups; ++other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += group_sums[other][position].values[i];
    }
  }
  if (count > 0) epilogue.store(sums, first, count);
}

}  // namespace tcgemm::split_reduction
