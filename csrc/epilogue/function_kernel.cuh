// Adds up the split-K partial products in the workspace and runs a generated function of the result, for kernels that
// cannot run it themselves. A warp has eight rows of four times eight columns, and of these a thread what it has of a
// fragment of tensor cores: element (lane / 4, 8 * group + lane % 4 * 2 + e).
#pragma once

#include <cstdint>

#include "epilogue/function.cuh"
#include "epilogue/function_reads.cuh"
#include "epilogue/function_sums.cuh"

namespace tcgemm::epilogue {

inline constexpr int32_t kSplitsAtOnce = 8;

// A thread's accumulators, added up over all splits: see run_on_eight_rows. (m, n): its first element.
template <bool kWhole, typename Sum, int kSets, int kAccs>
__device__ __forceinline__ void add_splits(const FunctionSums& sums, const FunctionParams& params, int32_t batch_idx,
                                           int32_t m, int32_t n, Sum (&acc)[kSets][kAccs]) {
  const Sum* from = static_cast<const Sum*>(sums.data) + (int64_t{batch_idx} * params.m + m) * params.n + n;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int i = 0; i < kAccs; ++i) acc[set][i] = 0;
#pragma unroll 1
    for (int32_t first = 0; first < sums.num_splits; first += kSplitsAtOnce) {  // mutant: a_split_is_left_out
      // Loaded before the first is added: a loop that adds each one waits for memory each time.
      const int32_t count = min(kSplitsAtOnce, sums.num_splits - first);
      Sum splits[kSplitsAtOnce][kAccs] = {};
#pragma unroll
      for (int split = 0; split < kSplitsAtOnce; ++split) {
        if (split >= count) break;  // mutant: split_not_bounded
#pragma unroll
        for (int i = 0; i < kAccs; ++i) {
          const int32_t column = i / 2 * 8 + i % 2;
          if (kWhole || (m < params.m && n + column < params.n)) splits[split][i] = from[column];
        }
        from += sums.split_elements;
      }
#pragma unroll
      for (int split = 0; split < kSplitsAtOnce; ++split) {
#pragma unroll
        for (int i = 0; i < kAccs; ++i) acc[set][i] += splits[split][i];
      }
    }
  }
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
  run_on_eight_rows<F, kFunctionGroups>(
      params, MatrixIndex(params, batch_idx), m_idx, n_idx, [&](auto is_whole, auto& acc) {
        add_splits<decltype(is_whole)::value>(sums, params, batch_idx, m_idx + lane / 4, n_idx + lane % 4 * 2, acc);
      });
}

}  // namespace tcgemm::epilogue
