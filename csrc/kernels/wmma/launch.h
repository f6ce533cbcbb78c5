// The kernels of this family for problems that reject() has let through: what they are called, and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "core/implementation.h"
#include "kernels/common/kernel.h"

namespace tcgemm::wmma {

// What a config's name says.
struct ConfigName {
  std::string_view shape, tile;
  bool saturates;
};

// Their target is the device's: machine code is of one architecture.
KernelSource naive_source(const Problem& p, const ConfigName& config);
Status launch_naive(const Problem& p, const Buffers& buffers, const ConfigName& config, const Kernel& kernel,
                    cudaStream_t stream);

// `runs_function`: the kernel that runs the problem's function of its accumulators.
KernelSource tiled_source(const Problem& p, const ConfigName& config, bool runs_function);
Status launch_tiled(const Problem& p, const Buffers& buffers, const ConfigName& config, bool runs_function,
                    const Kernel& kernel, cudaStream_t stream);

}  // namespace tcgemm::wmma
