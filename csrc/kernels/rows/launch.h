// The launch of sums and products of rows, for problems that reject() has let through.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/rows_problem.h"
#include "kernels/common/kernel.h"
#include "kernels/rows/instance.h"

namespace tcgemm::rows {

// Of the launch with an element a thread, which has the most.
int64_t most_blocks(const RowsProblem& p);

// Of the arrays of a call.
Shape shape_of(const RowsProblem& p, const RowsBuffers& buffers);

// Launches a kernel of that shape.
Status launch(const RowsProblem& p, const RowsBuffers& buffers, const Shape& shape, const Kernel& kernel,
              cudaStream_t stream);

}  // namespace tcgemm::rows
