// What a launch tells reduction_kernel.cuh.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"
#include "tile/reduce_op.cuh"

namespace tcgemm::reduction {

inline constexpr int kThreads = 256;

// One launch: `splits` parts of `part` reduced indices each; out is (outer, splits, inner).
struct Pass {
  ReduceOp op;
  int64_t outer, reduced, inner;
  int64_t splits, part;
  FloatType out;  // unless the operand is float64: then so is the result
  int64_t tiles;  // rows_kernel: warps a row; columns_kernel: blocks side by side
  int lanes;      // columns_kernel: threads side by side, a power of two
};

}  // namespace tcgemm::reduction
