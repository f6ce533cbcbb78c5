// One function a file of instantiations, for problems that reject() has let through.
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

// An instantiation of wmma_tiled.
struct Tiled {
  // Its kernel that runs a function, which is compiled for the call.
  KernelSource (*function_source)(const std::string& function);
  // Launches that, or, without one, the kernel that was built.
  Status (*launch)(const Problem& p, const Buffers& buffers, const Kernel* with_function, cudaStream_t stream);
};

Status launch_naive(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream);
Tiled tiled_16bit(const Problem& p, const ConfigName& config);
Tiled tiled_any_layout(const Problem& p, const ConfigName& config);
Tiled tiled_8bit(const Problem& p, const ConfigName& config);
Tiled tiled_wide(const Problem& p);

}  // namespace tcgemm::wmma
