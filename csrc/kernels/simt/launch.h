// One launch function a file of instantiations, for problems that reject() has let through.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "core/implementation.h"

namespace tcgemm::simt {

Status launch_naive(const Problem& p, const Buffers& buffers, cudaStream_t stream);
Status launch_tiled_f32(const Problem& p, const Buffers& buffers, std::string_view config, cudaStream_t stream);
Status launch_tiled_wide(const Problem& p, const Buffers& buffers, cudaStream_t stream);

}  // namespace tcgemm::simt
