// One launch function a file of instantiations, for problems that reject() has let through.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "core/implementation.h"

namespace tcgemm::wmma {

// What a config's name says.
struct ConfigName {
  std::string_view shape, tile;
  bool saturates;
};

Status launch_naive(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream);
Status launch_tiled_16bit(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream);
Status launch_tiled_any_layout(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream);
Status launch_tiled_8bit(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream);
Status launch_tiled_wide(const Problem& p, const Buffers& buffers, cudaStream_t stream);

}  // namespace tcgemm::wmma
