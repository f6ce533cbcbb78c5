// CUDA runtime errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/implementation.h"

namespace tcgemm {

// Also forgets the error, which the runtime would otherwise report again for the thread's next launch.
inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::ok();
  cudaGetLastError();
  return Status::internal(std::string(what) + " failed: " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace tcgemm
