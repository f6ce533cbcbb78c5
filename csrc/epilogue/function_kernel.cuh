// Adds up the parts of a product in the workspace and runs a generated function of the sums, for kernels that cannot
// run it themselves. A warp has eight rows of four times eight columns, and of these a thread what it has of a fragment
// of tensor cores: element (lane / 4, 8 * group + lane % 4 * 2 + e).
#pragma once

#include <cstdint>

#include "epilogue/function.cuh"
#include "tile/divisor.cuh"

namespace tcgemm::epilogue {

// Products as [split][batch][m][n]; those of a gated product's second matrix follow.
struct FunctionSums {
  const void* data;
  int32_t num_splits;
  int64_t split_elements;
  // What warps have, along columns and rows, and how many there are.
  Divisor per_columns, per_rows;
  int32_t columns, rows;
  int64_t num_warps;
};

inline constexpr int kFunctionThreads = 256, kFunctionRows = 8, kFunctionGroups = 4,
                     kFunctionColumns = 8 * kFunctionGroups;
inline constexpr int32_t kSplitsAtOnce = 8;

// `kWhole`: all of a warp's elements are inside, and lie as FunctionTile wants it.
template <typename F, bool kWhole>
__device__ __forceinline__ void run_function(const FunctionSums& sums, const FunctionParams& params,
                                             const BatchPlace& batch, int lane, int32_t m, int32_t n_idx, int groups) {
  using Sum = typename F::Sum;
  using Tile = FunctionTile<F, false, false, kWhole, kFunctionGroups, 1>;
  typename Tile::Reads reads;
  Tile tile(params, batch, lane, m, n_idx, groups, reads);
  tile.load();
  constexpr int kSets = F::kIsGated ? 2 : 1, kSums = 2 * kFunctionGroups;
  const int32_t n = n_idx + lane % 4 * 2;
  Sum all[kSets][kSums] = {};
  const Sum* part = static_cast<const Sum*>(sums.data) + (int64_t{batch.idx} * params.m + m) * params.n + n;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll 1
    for (int32_t first = 0; first < sums.num_splits; first += kSplitsAtOnce) {
      // Loaded before the first is added: a loop that adds each one waits for memory each time.
      const int32_t count = min(kSplitsAtOnce, sums.num_splits - first);
      Sum parts[kSplitsAtOnce][kSums] = {};
#pragma unroll
      for (int split = 0; split < kSplitsAtOnce; ++split) {
        if (split >= count) break;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const int32_t column = i / 2 * 8 + i % 2;
          if (kWhole || (m < params.m && n + column < params.n)) parts[split][i] = part[column];
        }
        part += sums.split_elements;
      }
#pragma unroll
      for (int split = 0; split < kSplitsAtOnce; ++split) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) all[set][i] += parts[split][i];
      }
    }
  }
  tile.run(all[0], all[kSets - 1]);
}

template <typename F>
__global__ void __launch_bounds__(kFunctionThreads)
    function_kernel(const __grid_constant__ FunctionSums sums, const __grid_constant__ FunctionParams params) {
  const int64_t warp = (int64_t{blockIdx.x} * kFunctionThreads + threadIdx.x) / 32;
  if (warp >= sums.num_warps) return;
  const int32_t lane = threadIdx.x % 32;
  const int32_t line = sums.per_columns.divide(static_cast<int32_t>(warp));
  const int32_t batch_idx = sums.per_rows.divide(line);
  const int32_t n_idx = (static_cast<int32_t>(warp) - line * sums.columns) * kFunctionColumns;
  const int32_t m_idx = (line - batch_idx * sums.rows) * kFunctionRows;
  const int32_t m = m_idx + lane / 4;
  const BatchPlace batch(params, batch_idx);
  const int groups = min(kFunctionGroups, (params.n - n_idx + 7) / 8);
  if (params.in_eights && m_idx + kFunctionRows <= params.m && n_idx + kFunctionColumns <= params.n) {
    run_function<F, true>(sums, params, batch, lane, m, n_idx, groups);
  } else {
    run_function<F, false>(sums, params, batch, lane, m, n_idx, groups);
  }
}

}  // namespace tcgemm::epilogue
