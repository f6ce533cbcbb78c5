// What the host side of every family does to launch an instantiation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda_status.h"
#include "core/problem.h"
#include "kernels/common/kernel.h"

namespace tcgemm {

// visit(is_a_transposed, is_b_transposed), both as std::bool_constant: a kernel for each layout.
template <typename Visit>
auto visit_layouts(const Problem& p, const Visit& visit) {
  if (p.a.transposed) {
    return p.b.transposed ? visit(std::true_type{}, std::true_type{}) : visit(std::true_type{}, std::false_type{});
  }
  return p.b.transposed ? visit(std::false_type{}, std::true_type{}) : visit(std::false_type{}, std::false_type{});
}

#ifdef __CUDACC__
// `shared_bytes` of dynamic shared memory, which may be more than a kernel has unasked.
template <typename... Parameters>
Status launch_blocks(const char* name, void (*kernel)(Parameters...), int64_t num_blocks, int num_threads,
                     int shared_bytes, cudaStream_t stream, const Parameters&... arguments) {
  if (shared_bytes > 0) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (Status s = cuda_status(error, name); !s.is_ok()) return s;
  }
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(num_blocks));
  launch.blockDim = dim3(num_threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&launch, kernel, arguments...), name);
}
#endif

// Launches a kernel with these parameters, whoever compiled it.
template <typename... Parameters>
Status launch_blocks(const char* name, const Kernel& kernel, int64_t num_blocks, int num_threads, int shared_bytes,
                     cudaStream_t stream, const Parameters&... arguments) {
#ifdef __CUDACC__
  const auto function = reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(kernel.function()));
  return launch_blocks(name, function, num_blocks, num_threads, shared_bytes, stream, arguments...);
#else
  // The functions of the runtime that take a kernel by its type are nvcc's alone.
  const void* const function = kernel.function();
  const cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (Status s = cuda_status(error, name); !s.is_ok()) return s;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(num_blocks));
  launch.blockDim = dim3(num_threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  void* pointers[] = {const_cast<Parameters*>(&arguments)...};
  return cuda_status(cudaLaunchKernelExC(&launch, function, pointers), name);
#endif
}

}  // namespace tcgemm
