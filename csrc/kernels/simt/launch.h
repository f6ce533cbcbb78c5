// The kernels of this family for problems that reject() has let through: what they are called, and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "core/implementation.h"
#include "kernels/common/kernel.h"

namespace tcgemm::simt {

// Their target is the device's.
KernelSource naive_source(const Problem& p);
Status launch_naive(const Problem& p, const Buffers& buffers, const Kernel& kernel, cudaStream_t stream);

KernelSource tiled_source(const Problem& p, std::string_view config);
Status launch_tiled(const Problem& p, const Buffers& buffers, std::string_view config, const Kernel& kernel,
                    cudaStream_t stream);

}  // namespace tcgemm::simt
