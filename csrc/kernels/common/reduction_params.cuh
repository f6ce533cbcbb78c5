// What a launch tells reduction_kernel.cuh.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"
#include "tile/reduce_op.cuh"

namespace tcgemm::reduction {

inline constexpr int kThreads = 256;

// One launch. The reduced mode is divided into `splits` of `elements_per_split`; out is (outer, splits, inner).
struct Pass {
  ReduceOp op;
  int64_t outer, reduced, inner;
  int64_t splits, elements_per_split;
  FloatType out;          // unless the operand is float64: then so is the result
  int64_t warps_per_row;  // of rows_kernel
  int64_t inner_tiles;    // of columns_kernel: CTAs along the inner mode
  int threads_inner;      // of columns_kernel: threads of a CTA along the inner mode, a power of two
};

}  // namespace tcgemm::reduction
