#include <algorithm>

#include "core/cuda_status.h"
#include "kernels/common/alignment.h"
#include "kernels/common/early_start.cuh"
#include "kernels/common/fused.h"
#include "kernels/common/split_reduction.h"
#include "tile/divisor.cuh"
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
  int64_t m, n;

  template <int kCount>
  __device__ __forceinline__ void store(int32_t (&sums)[kCount], int32_t (&)[kCount], int64_t, int64_t, int64_t n_idx,
                                        int count) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[i] *= alpha;
      if (beta != 0 && i < count) sums[i] += beta * c[n_idx + i];
    }
    if (vectors && count == kCount) return store_vectors(sums, d + n_idx);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) d[n_idx + i] = sums[i];
    }
  }
};

// The same of floating-point types: what there is of an epilogue in most calls, in few instructions, which are
// all read from memory once.
struct Floats {
  FloatType type;
  float alpha, beta;
  const void* c;
  void* d;
  bool vectors;
  int64_t m, n;

  template <int kCount>
  __device__ __forceinline__ void store(float (&sums)[kCount], float (&)[kCount], int64_t, int64_t, int64_t n_idx,
                                        int count) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] *= alpha;
    epilogue::add_c_and_store(sums, type, beta, c, d, n_idx, count, vectors && count == kCount);
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

// Where a thread finds its row, in units of kCount columns. Without `is_short`, there are 2^31 or more.
struct Rows {
  int64_t count, units_per_row;
  bool is_short;
  Divisor per_row, per_batch;

  __device__ __forceinline__ int64_t row_of(int64_t index) const {
    if (count == 1) return 0;
    return is_short ? per_row.divide(static_cast<int32_t>(index)) : index / units_per_row;
  }
};

// A matrix of `rows.count` rows (over all batch entries) and epilogue.n columns, kCount of them a thread.
// `vectors`: rows start on 16 bytes of the partial products. Each of kGroups threads adds up every
// kGroups-th partial product of the same elements, and the groups' sums are added in order: more groups
// put more blocks to work on a small D.
template <typename Partial, typename Epilogue, int kGroups, int kCount>
__global__ void __launch_bounds__(kThreads)
    reduce(const Partial* partials, const Rows rows, int num_splits, bool vectors, bool has_two_sets,
           const __grid_constant__ Epilogue epilogue) {
  constexpr int kAcross = kThreads / kGroups;
  struct alignas(16) Sums {
    Partial values[kCount];
  };
  __shared__ Sums group_sums[kGroups > 1 ? kGroups : 1][kGroups > 1 ? kAcross : 1];
  const int position = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kAcross + position;
  const int64_t row = rows.row_of(index);
  const int64_t n_idx = (index - row * rows.units_per_row) * kCount;
  const bool is_inside = row < rows.count && n_idx < epilogue.n;
  const int count = is_inside ? static_cast<int>(min(epilogue.n - n_idx, int64_t{kCount})) : 0;
  const int64_t elements = rows.count * epilogue.n;
  start_dependents();
  wait_for_previous();

  const auto sum_set = [&](Partial(&sums)[kCount], int set) {
    const Partial* source = partials + set * num_splits * elements + row * epilogue.n + n_idx;
    add_splits(sums, source, elements, group, num_splits, kGroups, count, vectors && count == kCount);
    if constexpr (kGroups > 1) {
      if (set > 0) __syncthreads();
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
  };
  Partial sums[kCount], sums_up[kCount] = {};
  sum_set(sums, 0);
  if (has_two_sets) sum_set(sums_up, 1);
  if (!is_inside || group > 0) return;
  const int64_t batch_idx = rows.is_short ? rows.per_batch.divide(static_cast<int32_t>(row)) : row / epilogue.m;
  epilogue.store(sums, sums_up, batch_idx, row - batch_idx * epilogue.m, n_idx, count);
}

template <typename Partial, int kGroups, int kCount, typename Epilogue>
Status launch_reduce(const SplitSums& sums, int64_t rows, bool has_two_sets, const Epilogue& epilogue,
                     bool starts_early, cudaStream_t stream) {
  const int64_t units_per_row = (epilogue.n + kCount - 1) / kCount, units = rows * units_per_row;
  constexpr int kPerBlock = kThreads / kGroups;
  Rows described{rows, units_per_row, units + kThreads < int64_t{1} << 31, {}, {}};
  if (described.is_short) {
    described.per_row = Divisor(std::max<int64_t>(units_per_row, 1));
    described.per_batch = Divisor(std::max<int64_t>(epilogue.m, 1));
  }
  const bool aligned = is_aligned(sums.data, 16) && epilogue.n * 4 % 16 == 0;
  return launch_early(&reduce<Partial, Epilogue, kGroups, kCount>, (units + kPerBlock - 1) / kPerBlock, kThreads,
                      starts_early, stream, "split reduction kernel", static_cast<const Partial*>(sums.data), described,
                      sums.num_splits, aligned, has_two_sets, epilogue);
}

template <typename Partial, typename Epilogue>
Status launch(const SplitSums& sums, int64_t rows, bool has_two_sets, const Epilogue& epilogue, bool starts_early,
              cudaStream_t stream) {
  // Where few threads would be too few for the device, a thread has less to do.
  constexpr int64_t kMany = 1 << 20;
  const auto run = sums.num_splits >= 8         ? &launch_reduce<Partial, 8, 4, Epilogue>
                   : rows * epilogue.n >= kMany ? &launch_reduce<Partial, 1, 8, Epilogue>
                                                : &launch_reduce<Partial, 1, 4, Epilogue>;
  return run(sums, rows, has_two_sets, epilogue, starts_early, stream);
}

}  // namespace

Status launch_split_reduction(const Problem& p, const Buffers& buffers, const SplitSums& sums, bool starts_early,
                              cudaStream_t stream) {
  if (!p.epilogue.is_none()) {
    const epilogue::Fused epilogue = epilogue::make_fused(p, buffers);
    return launch<float>(sums, p.batch * p.m, p.has_two_b(), epilogue, starts_early, stream);
  }
  // All of D is one row, which needs no division to find a column.
  const int64_t columns = p.batch * p.m * p.n;
  const bool d_vectors = is_aligned(buffers.d, 16);
  if (p.out == DType::kS32) {
    const Integers epilogue{static_cast<int32_t>(p.alpha),
                            static_cast<int32_t>(p.beta),
                            static_cast<const int32_t*>(buffers.c),
                            static_cast<int32_t*>(buffers.d),
                            d_vectors,
                            1,
                            columns};
    return launch<int32_t>(sums, 1, false, epilogue, starts_early, stream);
  }
  const Floats epilogue{epilogue::float_type(p.out),
                        static_cast<float>(p.alpha),
                        static_cast<float>(p.beta),
                        buffers.c,
                        buffers.d,
                        d_vectors && is_aligned(buffers.c, 16),
                        1,
                        columns};
  return launch<float>(sums, 1, false, epilogue, starts_early, stream);
}

}  // namespace tcgemm
