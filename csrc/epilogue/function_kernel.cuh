// Adds up the parts of a product in the workspace and runs a generated function of the sums, for kernels that cannot
// run it themselves. Two neighbours of a row for each thread.
#pragma once

#include <cstdint>

#include "epilogue/function.cuh"

namespace tcgemm::epilogue {

// Products as [split][batch][m][n]; those of a gated product's second matrix follow.
struct FunctionSums {
  const void* data;
  int32_t num_splits;
  int64_t split_elements;
  int64_t rows;  // of all matrices
};

inline constexpr int kFunctionThreads = 256;

template <typename F>
__global__ void __launch_bounds__(kFunctionThreads)
    function_kernel(const __grid_constant__ FunctionSums sums, const __grid_constant__ FunctionParams params) {
  using Sum = typename F::Sum;
  const int64_t pairs_per_row = (params.n + 1) / 2;
  const int64_t index = int64_t{blockIdx.x} * kFunctionThreads + threadIdx.x;
  const int64_t row = index / pairs_per_row;
  if (row >= sums.rows) return;
  const int32_t n = static_cast<int32_t>(index - row * pairs_per_row) * 2;
  const int32_t batch_idx = static_cast<int32_t>(row / params.m),
                m = static_cast<int32_t>(row - int64_t{batch_idx} * params.m);
  const BatchPlace batch(params, batch_idx);
  FunctionTile<F, false, false, false, 1, 1> tile(params, batch, m, n, 1);
  constexpr int kSets = F::kIsGated ? 2 : 1;
  Sum both[kSets][2] = {};
  const Sum* part = static_cast<const Sum*>(sums.data) + row * params.n + n;
  const bool has_second = n + 1 < params.n;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    for (int32_t split = 0; split < sums.num_splits; ++split, part += sums.split_elements) {
      both[set][0] += part[0];
      if (has_second) both[set][1] += part[1];
    }
  }
  tile.run(both[0], both[kSets - 1]);
}

}  // namespace tcgemm::epilogue
