// A tensor map among the arguments of a kernel.
#pragma once

#include <cuda.h>

namespace tcgemm::tile {

// CUDA 12 aligns it to 64 bytes and CUDA 13 to 128, and a launcher and its kernel need not be compiled by the same.
struct alignas(128) TensorMap : CUtensorMap {};
static_assert(sizeof(TensorMap) == 128, "as the driver has it");

}  // namespace tcgemm::tile
