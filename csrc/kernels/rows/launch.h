// The launch of sums and products of rows, for problems that reject() has let through.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/rows_problem.h"

namespace tcgemm::rows {

// Of the launch with an element a thread, which has the most.
int64_t most_blocks(const RowsProblem& p);

Status launch(const RowsProblem& p, const RowsBuffers& buffers, cudaStream_t stream);

}  // namespace tcgemm::rows
