// Host side of the family: one launcher for each (tile, instruction), in its own object file.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "core/problem.h"
#include "kernels/mma_sync/config.cuh"
#include "kernels/mma_sync/instruction.cuh"

namespace tcgemm::mma {

// Enqueues the product. With `splits` > 1 D is not the sum but the `splits` parts of it along K, one
// batch after another. Explicitly instantiated by the instance_*.cu files.
template <typename Tile, typename Instruction>
Status launch(const Problem& problem, const Buffers& buffers, const Device& device, int splits, cudaStream_t stream);

}  // namespace tcgemm::mma
