// Host side of the family: one launcher for each (tile, instruction), in its own object file.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "core/problem.h"
#include "kernels/mma_sync/config.cuh"
#include "kernels/mma_sync/instruction.cuh"

namespace tcgemm::mma {

// Enqueues the product, in `splits` parts along K that are summed in a fixed order when there is
// more than one. Explicitly instantiated by the instance_*.cu files.
template <typename Tile, typename Instruction>
Status launch(const Problem& problem, const Buffers& buffers, const Device& device, int splits, cudaStream_t stream);

// D = alpha * (partial sums of all splits) + beta * C. `buffers.workspace` holds [splits][batch][m][n]
// elements of float, or of int32_t when the output is s32.
Status launch_reduction(const Problem& problem, const Buffers& buffers, int splits, cudaStream_t stream);

}  // namespace tcgemm::mma
