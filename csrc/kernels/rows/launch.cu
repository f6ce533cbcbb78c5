// The kernels of core/rows_problem.h. Bound by memory: rows move in 16-byte loads where they lie on such
// boundaries, element by element elsewhere. Sums are kept in float32 and in the order of the pairs.
#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/launch.cuh"
#include "kernels/rows/launch.h"
#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::rows {
namespace {

constexpr int kThreads = 256;

struct SumsParams {
  const void* a;
  const int32_t* indices;
  const int32_t* starts;
  const float* weights;  // null: all 1
  void* d;
  int32_t a_rows, targets, pairs;
  int32_t packs;  // of kCount elements, in a row
  int32_t lanes;  // threads for one target, a power of two
  int32_t column_blocks;
};

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T values[kCount];
};

// A thread has kPacks packs of one target's columns, and rows of kUnroll pairs on their way at a time: with
// fewer bytes under way memory is not kept busy, so several packs where targets have few pairs. These have
// kWideLanes threads for a target, which as a constant leaves one address for all packs.
constexpr int kWideLanes = 128;

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

struct DotsParams {
  const void* a;
  const void* b;
  const int32_t* indices;
  const int32_t* b_indices;
  float* d;
  int32_t a_rows, b_rows, pairs, packs;
};

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

// How targets are spread over threads that have `each` packs: see SumsParams.
int32_t lanes_of(int64_t packs, int each) {
  if (each > 1) return kWideLanes;
  int32_t lanes = 1;
  while (lanes < kThreads && lanes < packs) lanes *= 2;
  return lanes;
}

int64_t sums_blocks(const RowsProblem& p, int64_t packs, int each) {
  const int32_t lanes = lanes_of(packs, each);
  return ceil_div(p.targets, kThreads / lanes) * ceil_div(packs, lanes * each);
}

template <typename T, int kCount, int kPacks>
Status launch_sums(const RowsProblem& p, const RowsBuffers& buffers, cudaStream_t stream) {
  const int64_t packs = p.n / kCount;
  const int32_t lanes = lanes_of(packs, kPacks);
  const SumsParams params{buffers.a,
                          buffers.indices,
                          buffers.starts,
                          static_cast<const float*>(buffers.weights),
                          buffers.d,
                          static_cast<int32_t>(p.a_rows),
                          static_cast<int32_t>(p.targets),
                          static_cast<int32_t>(p.pairs),
                          static_cast<int32_t>(packs),
                          lanes,
                          static_cast<int32_t>(ceil_div(packs, lanes * kPacks))};
  return launch_blocks("kernel of sums of rows", sum_rows<T, kCount, kPacks>, sums_blocks(p, packs, kPacks), kThreads,
                       0, stream, params);
}

template <typename T, int kCount>
Status launch_dots(const RowsProblem& p, const RowsBuffers& buffers, cudaStream_t stream) {
  const DotsParams params{buffers.a,
                          buffers.b,
                          buffers.indices,
                          buffers.b_indices,
                          static_cast<float*>(buffers.d),
                          static_cast<int32_t>(p.a_rows),
                          static_cast<int32_t>(p.b_rows),
                          static_cast<int32_t>(p.pairs),
                          static_cast<int32_t>(p.n / kCount)};
  return launch_blocks("kernel of products of rows", multiply_rows<T, kCount>, ceil_div(p.pairs, kThreads / 32),
                       kThreads, 0, stream, params);
}

template <typename T>
Status launch_typed(const RowsProblem& p, const RowsBuffers& buffers, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(T);
  const void* other = p.is_sums() ? buffers.d : buffers.b;
  const bool whole = p.n % kCount == 0 && is_aligned(buffers.a, 16) && is_aligned(other, 16);
  if (p.is_sums()) {
    if (!whole) return launch_sums<T, 1, 1>(p, buffers, stream);
    const bool wide = p.n > kWideLanes * kCount && p.pairs < 4 * p.targets;
    return wide ? launch_sums<T, kCount, 4>(p, buffers, stream) : launch_sums<T, kCount, 1>(p, buffers, stream);
  }
  return whole ? launch_dots<T, kCount>(p, buffers, stream) : launch_dots<T, 1>(p, buffers, stream);
}

}  // namespace

int64_t most_blocks(const RowsProblem& p) {
  return p.is_sums() ? sums_blocks(p, p.n, 1) : ceil_div(p.pairs, kThreads / 32);
}

Status launch(const RowsProblem& p, const RowsBuffers& buffers, cudaStream_t stream) {
  switch (p.in) {
    case DType::kF16: return launch_typed<__half>(p, buffers, stream);
    case DType::kBF16: return launch_typed<__nv_bfloat16>(p, buffers, stream);
    default: return launch_typed<float>(p, buffers, stream);
  }
}

}  // namespace tcgemm::rows
