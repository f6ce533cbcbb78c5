// What passes between the implementation (packed.cc) and the launcher (launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/packed_problem.h"
#include "kernels/common/function.h"
#include "kernels/common/kernel.h"
#include "kernels/packed/geometry.h"
#include "kernels/packed/params.cuh"

namespace tcgemm::packed {

struct Call {
  Kernel* kernel;
  Geometry geometry;
  const PackedProblem* problem;
  PackedBuffers buffers;
  cudaStream_t stream;
};

// Blocks of a launch; of experts as many as there may be, whatever their tokens.
int64_t num_blocks(const PackedProblem& p, int columns, int rows, int cluster);

// Calls launch(epilogue) with what a product's kernel is given for its epilogue.
template <typename Launch>
Status with_epilogue(const PackedProblem& p, const PackedBuffers& buffers, Launch&& launch) {
  if (p.epilogue.is_none()) return launch(Bare{});
  // The inner level of the batch is the expert.
  return launch(make_function(p.epilogue.function, p.m, p.d_columns(), buffers, p.experts));
}

// What all kernels of products are told, of blocks of so many columns and rows and stages of so much of K.
Params params_of(const PackedProblem& p, const PackedBuffers& buffers, int columns, int rows, int stage_k);

// Launches call.kernel, which is of call.geometry.
Status launch(const Call& call);

// Writes the weight of a problem of that form, by a kernel for its types.
Status launch_weight(const PackedProblem& p, const PackedBuffers& buffers, const Kernel& kernel, cudaStream_t stream);

}  // namespace tcgemm::packed
