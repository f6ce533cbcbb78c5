// Arrays of addresses for functions of libraries that take such. They are written by a kernel, not copied from the
// host: a graph replays its copies, and the host's memory would be gone by then.
#pragma once

#include <cstdint>

#include "kernels/pointers/params.cuh"

namespace tcgemm::pointers {

__global__ void fill_kernel(const __grid_constant__ Bases bases, int64_t stride_bytes, int64_t batch, int64_t count,
                            const void** pointers) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    pointers[i] = bases.address[i / batch] + i % batch * stride_bytes;
  }
}

}  // namespace tcgemm::pointers
