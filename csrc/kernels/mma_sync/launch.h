// Host side of the family: one launcher for each (tile, instruction), an object file for each instruction.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "core/problem.h"
#include "kernels/mma_sync/config.cuh"

namespace tcgemm::mma {

// instruction.cuh
struct F16F32;
struct BF16F32;
struct F16F16;
struct TF32F32;
struct S8S32;
struct U8S32;

// Enqueues the product. With `splits` > 1 D is not the sum but the `splits` parts of it along K, one
// batch after another. Explicitly instantiated by the instance_*.cu files.
template <typename Tile, typename Instruction>
Status launch(const Problem& problem, const Buffers& buffers, const Device& device, int splits, cudaStream_t stream);

}  // namespace tcgemm::mma
