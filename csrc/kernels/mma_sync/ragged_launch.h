// Host side of mma_sync's grouped products.
#pragma once

#include <cuda_runtime_api.h>

#include "core/ragged_problem.h"
#include "kernels/mma_sync/launch.h"

namespace tcgemm::mma {

// The one tile of grouped products.
using RaggedTile = Tile128Stages4;

// Enqueues one batch entry. Explicitly instantiated by ragged_instances.cu.
template <typename Instruction>
Status launch_ragged(const RaggedProblem& problem, const RaggedBuffers& buffers, cudaStream_t stream);

}  // namespace tcgemm::mma
