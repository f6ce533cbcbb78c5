// What passes between the implementation (quantize.cc) and the launcher (launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/quantize_problem.h"
#include "kernels/common/kernel.h"

namespace tcgemm::quantize {

// Blocks of a launch.
int64_t num_blocks(const QuantizeProblem& p);

// Launches the kernel that is of this problem.
Status launch(const QuantizeProblem& p, const QuantizeBuffers& buffers, const Kernel& kernel, cudaStream_t stream);

}  // namespace tcgemm::quantize
