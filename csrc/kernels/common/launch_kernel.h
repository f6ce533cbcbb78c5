// The launch of a kernel that a program brought.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/kernel.h"

namespace tcgemm {

// `arguments` have exactly the types of the kernel's parameters.
template <typename... Parameters>
cudaError_t launch_kernel(const cudaLaunchConfig_t& launch, const Kernel& kernel, const Parameters&... arguments) {
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernelExC(&launch, kernel.function(), addresses);
}

}  // namespace tcgemm
