// What passes between the implementation (packed.cc) and the launcher of many rows (wide_launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/extent.h"
#include "core/packed_problem.h"
#include "kernels/common/kernel.h"
#include "kernels/packed/geometry.h"

namespace tcgemm::packed {

struct WideCall {
  Kernel* kernel;
  Kernel* order;  // order_kernel.cuh
  WideGeometry geometry;
  const PackedProblem* problem;
  PackedBuffers buffers;
  cudaStream_t stream;
};

// Launches call.kernel, which is of call.geometry, and the copy of x into the workspace before it.
Status launch_wide(const WideCall& call);

// Length of a row of that copy: K padded as the weight is.
inline int64_t ordered_k(const PackedProblem& p) {
  return ceil_div(p.k, PackedProblem::kMultipleK) * PackedProblem::kMultipleK;
}
inline int64_t ordered_bytes(const PackedProblem& p, int64_t rows) {
  return multiply_add(rows, ordered_k(p) * dtype_bytes(p.in), 0);
}

// Of the kernel that makes it.
int64_t num_order_blocks(const PackedProblem& p);

}  // namespace tcgemm::packed
