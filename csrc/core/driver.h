// The CUDA driver's own functions, reached through the runtime so that libcuda is never linked.
#pragma once

#include <cuda_runtime_api.h>

namespace tcgemm {

// As CUDA `version` (12000 for 12.0) declares it; null where the driver is older. `Function` is a pointer's type.
template <typename Function>
Function find_driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

}  // namespace tcgemm
