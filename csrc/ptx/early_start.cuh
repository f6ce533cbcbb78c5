// Both sides of programmatic dependent launch, on compute capability 9.0; nothing on older ones, where a kernel begins
// when the one before it has ended.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
#pragma once

#include "ptx/cluster.cuh"

namespace tcgemm::ptx {

__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  griddepcontrol_launch_dependents();
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  griddepcontrol_wait();
#endif
}

}  // namespace tcgemm::ptx
