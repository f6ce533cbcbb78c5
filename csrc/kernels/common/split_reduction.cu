#include <algorithm>

#include "core/cuda_status.h"
#include "kernels/common/alignment.h"
#include "kernels/common/early_start.cuh"
#include "kernels/common/float_type.h"
#include "kernels/common/split_reduction.h"
#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm {
namespace {

constexpr int kThreads = 256;

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

// All of D as one row of `elements`, kCount of them a thread. `vectors`: parts start on 16 bytes. Each of kGroups
// threads adds up every kGroups-th partial product of the same elements, and the groups' sums are added in order: more
// groups put more blocks to work on a small D.
template <typename Partial, typename Epilogue, int kGroups, int kCount>
__global__ void __launch_bounds__(kThreads) reduce(const Partial* partials, int64_t elements, int num_splits,
                                                   bool vectors, const __grid_constant__ Epilogue epilogue) {
  constexpr int kAcross = kThreads / kGroups;
  struct alignas(16) Sums {
    Partial values[kCount];
  };
  __shared__ Sums group_sums[kGroups > 1 ? kGroups : 1][kGroups > 1 ? kAcross : 1];
  const int position = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kAcross + position) * kCount;
  const int count = first < elements ? static_cast<int>(min(elements - first, int64_t{kCount})) : 0;
  start_dependents();
  wait_for_previous();

  Partial sums[kCount];
  add_splits(sums, partials + first, elements, group, num_splits, kGroups, count, vectors && count == kCount);
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

template <typename Partial, int kGroups, int kCount, typename Epilogue>
Status launch_reduce(const SplitSums& sums, int64_t elements, const Epilogue& epilogue, bool starts_early,
                     cudaStream_t stream) {
  constexpr int64_t kPerBlock = int64_t{kThreads} / kGroups * kCount;
  const bool aligned = is_aligned(sums.data, 16) && elements * 4 % 16 == 0;
  return launch_early(&reduce<Partial, Epilogue, kGroups, kCount>, (elements + kPerBlock - 1) / kPerBlock, kThreads,
                      starts_early, stream, "split reduction kernel", static_cast<const Partial*>(sums.data), elements,
                      sums.num_splits, aligned, epilogue);
}

template <typename Partial, typename Epilogue>
Status launch(const SplitSums& sums, int64_t elements, const Epilogue& epilogue, bool starts_early,
              cudaStream_t stream) {
  // Where few threads would be too few for the device, a thread has less to do.
  constexpr int64_t kMany = 1 << 20;
  const auto run = sums.num_splits >= 8 ? &launch_reduce<Partial, 8, 4, Epilogue>
                   : elements >= kMany  ? &launch_reduce<Partial, 1, 8, Epilogue>
                                        : &launch_reduce<Partial, 1, 4, Epilogue>;
  return run(sums, elements, epilogue, starts_early, stream);
}

}  // namespace

Status launch_split_reduction(const Problem& p, const Buffers& buffers, const SplitSums& sums, bool starts_early,
                              cudaStream_t stream) {
  const int64_t elements = p.batch * p.m * p.n;
  const bool vectors = is_aligned(buffers.d, 16) && is_aligned(buffers.c, 16);
  if (p.out == DType::kS32) {
    const Integers epilogue{static_cast<int32_t>(p.alpha), static_cast<int32_t>(p.beta),
                            static_cast<const int32_t*>(buffers.c), static_cast<int32_t*>(buffers.d), vectors};
    return launch<int32_t>(sums, elements, epilogue, starts_early, stream);
  }
  const Floats epilogue{
      float_type(p.out), static_cast<float>(p.alpha), static_cast<float>(p.beta), buffers.c, buffers.d, vectors};
  return launch<float>(sums, elements, epilogue, starts_early, stream);
}

}  // namespace tcgemm
