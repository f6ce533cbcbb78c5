// What passes between the implementation (ragged.cc) and the launcher (ragged_launch.cu).
#pragma once

#include "core/ragged_problem.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {

// One batch entry.
struct RaggedCall {
  Kernel* kernel;
  Geometry geometry;
  bool has_epilogue;  // and may gather
  const RaggedProblem* problem;
  RaggedBuffers buffers;
  cudaStream_t stream;
};

// Launches call.kernel, which is of call.geometry and, if it has one, of kind Fused.
Status launch_ragged(const RaggedCall& call);

}  // namespace tcgemm::wgmma_family
