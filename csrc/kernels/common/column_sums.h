// Sums over the rows of D as stored, for bias gradients. No atomics: partial sums of kSumRows rows
// each, then their sum in order.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/implementation.h"

namespace tcgemm {

inline constexpr int kSumRows = 64;

// The partial sums, [batch][sum_blocks][columns of D] of float32.
inline int64_t sum_blocks(const Problem& p) { return (p.m + kSumRows - 1) / kSumRows; }
inline int64_t column_sums_bytes(const Problem& p) {
  return p.epilogue.column_sums ? 4 * p.batch * sum_blocks(p) * p.d_columns() : 0;
}

// Both steps, for kernels that have stored D; or the second alone, for those that made the partial
// sums. `partials`: column_sums_bytes() of workspace.
Status launch_column_sums(const Problem& problem, const Buffers& buffers, float* partials, bool starts_early,
                          cudaStream_t stream);
Status launch_sum_of_partials(const Problem& problem, const Buffers& buffers, const float* partials, bool starts_early,
                              cudaStream_t stream);

}  // namespace tcgemm
