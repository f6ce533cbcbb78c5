// Programmatic dependent launch: a kernel begins while the one before it on the stream still runs,
// and waits before it touches memory. Compute capability 9.0; an ordinary launch before that.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda_status.h"
#include "ptx/cluster.cuh"

namespace tcgemm {

__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_wait();
#endif
}

// Lets a kernel that waits for the one before it on the stream begin while that one ends.
inline cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel that calls both; `starts_early` must be false where the device is older. Shared memory
// is divided from L1 as it is for the product before or after it: a processor divides them anew only when it
// is idle, which would keep the blocks of the two apart.
template <typename... Parameters, typename... Arguments>
Status launch_early(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads, bool starts_early,
                    cudaStream_t stream, const char* name, Arguments... arguments) {
  if (starts_early) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return cuda_status(error, name);
  }
  cudaLaunchAttribute attribute = programmatic_launch();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(num_threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace tcgemm
