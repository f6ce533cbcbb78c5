// What passes between the implementation (ragged.cc) and the launcher (ragged_launch.cc).
#pragma once

#include "core/ragged_problem.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {

// One batch entry.
struct RaggedCall {
  Kernel* kernel;
  Geometry geometry;
  // Of the instruction's operands, of all entries; without data where there are none.
  OperandScales a_scales, b_scales;
  const RaggedProblem* problem;
  int64_t entry;
  RaggedBuffers buffers;             // of the entry
  const RaggedBuffers* all_buffers;  // of all, as a function takes them
  cudaStream_t stream;
};

// Launches call.kernel, which is of call.geometry, and of kind Function where the problem has one.
Status launch_ragged(const RaggedCall& call);

}  // namespace tcgemm::wgmma_family
