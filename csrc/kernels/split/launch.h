// What passes between the implementation (split.cc) and the launcher (launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/split_problem.h"
#include "kernels/common/kernel.h"

namespace tcgemm::split {

// Number of 16-byte vectors of one term and component of D.
int64_t num_vectors(const SplitProblem& p);

// Launches the kernel that is of this problem.
Status launch(const SplitProblem& p, const SplitBuffers& buffers, const Kernel& kernel, cudaStream_t stream);

}  // namespace tcgemm::split
