// What passes between the implementation (ragged.cc) and the launcher (ragged_launch.cc).
#pragma once

#include "core/ragged_problem.h"
#include "kernels/mma_sync/launch.h"

namespace tcgemm::mma {

// One batch entry.
struct RaggedCall {
  Kernel* kernel;
  Geometry geometry;
  const RaggedProblem* problem;
  RaggedBuffers buffers;
  cudaStream_t stream;
};

// Launches call.kernel, which is of call.geometry.
Status launch_ragged(const RaggedCall& call);

}  // namespace tcgemm::mma
