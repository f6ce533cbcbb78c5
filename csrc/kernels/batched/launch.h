// What passes between the implementation (batched.cc) and the launcher (launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "kernels/batched/geometry.h"
#include "kernels/common/kernel.h"

namespace tcgemm::batched {

// Launches the kernel that was compiled for this tiling.
Status launch(const Problem& p, const Buffers& buffers, const Device& device, const Tiling& tiling,
              const Kernel& kernel, cudaStream_t stream);

}  // namespace tcgemm::batched
