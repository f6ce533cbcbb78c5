// The second kernel of a product whose own kernel does not run its function.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "kernels/common/split_reduction.h"

namespace tcgemm {

// What a program has to bring for it.
KernelSource function_kernel_source(const Problem& problem, const Device& device);

// `sums`: the split-K partial products of the bare product.
Status launch_function(const Problem& problem, const Buffers& buffers, const SplitSums& sums, const Device& device,
                       cudaStream_t stream);

}  // namespace tcgemm
