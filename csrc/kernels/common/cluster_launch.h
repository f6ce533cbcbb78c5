// The launch of a persistent kernel with clusters.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "core/cuda_status.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"

namespace tcgemm {

// Raises a kernel's shared-memory limit on the current device, `ordinal`, once, and finds how many
// clusters of `launch` run there at once.
inline Status prepare_kernel(Kernel& kernel, const cudaLaunchConfig_t& launch, int ordinal, int* num_clusters) {
  std::atomic<int>& known = kernel.resident_clusters(ordinal);
  *num_clusters = known.load(std::memory_order_relaxed);
  if (*num_clusters > 0) return Status::ok();
  if (Status s = cuda_status(cudaFuncSetAttribute(kernel.function(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(launch.dynamicSmemBytes)),
                             "cudaFuncSetAttribute");
      !s.is_ok()) {
    return s;
  }
  const cudaError_t error = cudaOccupancyMaxActiveClusters(num_clusters, kernel.function(), &launch);
  if (Status s = cuda_status(error, "cudaOccupancyMaxActiveClusters"); !s.is_ok()) return s;
  if (*num_clusters < 1) return Status::internal("the device has no room for a cluster of the kernel");
  known.store(*num_clusters, std::memory_order_relaxed);
  return Status::ok();
}

// Whether this process runs these kernels on several devices. Then collectives hold SMs now and again, and
// blocks that would have run there start when others have ended.
inline bool uses_several_devices(int ordinal) {
  static std::atomic<uint64_t> seen{0};
  const uint64_t own = uint64_t{1} << (ordinal % 64);
  return ((seen.fetch_or(own, std::memory_order_relaxed) | own) & ~own) != 0;
}

// Launches a kernel with a cluster for each of `num_tiles`, or as many as the device runs at once. Where SMs
// may be missing there are more, each for `tiles_at_least` tiles or a little more, so that those that run take
// over from those that cannot start.
template <typename Parameters>
Status launch_clusters(Kernel& kernel, int cluster_size, int num_threads, int shared_bytes, const Parameters& params,
                       int64_t num_tiles, int64_t tiles_at_least, cudaStream_t stream, const char* what) {
  cudaLaunchAttribute attributes[2] = {programmatic_launch(), cluster_launch(cluster_size)};
  cudaLaunchConfig_t launch = launch_config(cluster_size, num_threads, shared_bytes, stream);
  launch.attrs = attributes;
  launch.numAttrs = 2;
  int ordinal = 0, num_resident = 0;
  if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
  if (Status s = prepare_kernel(kernel, launch, ordinal, &num_resident); !s.is_ok()) return s;
  int64_t num_clusters = std::min<int64_t>(num_tiles, num_resident);
  if (uses_several_devices(ordinal)) num_clusters = std::max(num_clusters, num_tiles / tiles_at_least);
  launch.gridDim.x *= static_cast<unsigned>(num_clusters);
  // Blocks without clusters are placed as the walk expects them only by a launch that knows of none.
  if (cluster_size == 1) launch.numAttrs = 1;
  return cuda_status(launch_kernel(launch, kernel, params), what);
}

}  // namespace tcgemm
