// What the host side of every family does to launch a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda_status.h"
#include "core/problem.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_kernel.h"

namespace tcgemm {

// visit(is_a_transposed, is_b_transposed), both as std::bool_constant: a kernel for each layout.
template <typename Visit>
auto visit_layouts(const Problem& p, const Visit& visit) {
  if (p.a.transposed) {
    return p.b.transposed ? visit(std::true_type{}, std::true_type{}) : visit(std::true_type{}, std::false_type{});
  }
  return p.b.transposed ? visit(std::false_type{}, std::true_type{}) : visit(std::false_type{}, std::false_type{});
}

inline cudaLaunchConfig_t launch_config(int64_t num_blocks, int num_threads, int shared_bytes, cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(num_blocks));
  launch.blockDim = dim3(static_cast<unsigned>(num_threads));
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  launch.stream = stream;
  return launch;
}

// `shared_bytes` of dynamic shared memory, which may be more than a kernel has unasked.
template <typename... Parameters>
Status launch_blocks(const char* name, const Kernel& kernel, int64_t num_blocks, int num_threads, int shared_bytes,
                     cudaStream_t stream, const Parameters&... arguments) {
  if (shared_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel.function(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (Status s = cuda_status(error, name); !s.is_ok()) return s;
  }
  const cudaLaunchConfig_t launch = launch_config(num_blocks, num_threads, shared_bytes, stream);
  return cuda_status(launch_kernel(launch, kernel, arguments...), name);
}

// Programmatic dependent launch: lets a kernel that waits for the one before it on the stream begin while that one
// ends. Compute capability 9.0.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
inline cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

inline cudaLaunchAttribute cluster_launch(int size) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Divides shared memory from L1 as it is for the product before or after a kernel: a processor divides them anew only
// when it is idle, which would keep the blocks of the two apart.
inline cudaError_t prefer_shared_memory(const Kernel& kernel) {
  return cudaFuncSetAttribute(kernel.function(), cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// Launches a kernel that waits for the one before it (ptx/early_start.cuh); `starts_early` must be false where the
// device is older than compute capability 9.0.
template <typename... Parameters>
Status launch_early(const char* name, const Kernel& kernel, int64_t num_blocks, int num_threads, bool starts_early,
                    cudaStream_t stream, const Parameters&... arguments) {
  if (starts_early) {
    if (Status s = cuda_status(prefer_shared_memory(kernel), name); !s.is_ok()) return s;
  }
  cudaLaunchAttribute attribute = programmatic_launch();
  cudaLaunchConfig_t launch = launch_config(num_blocks, num_threads, 0, stream);
  launch.attrs = &attribute;
  launch.numAttrs = starts_early ? 1 : 0;
  return cuda_status(launch_kernel(launch, kernel, arguments...), name);
}

}  // namespace tcgemm
