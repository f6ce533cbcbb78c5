// The calls of cuBLAS's functions.
#pragma once

#include "core/blas.h"
#include "libraries/cublas/api.h"

namespace tcgemm::cublas {

// One call whose handle has its stream, workspace and modes. `pointers` is device memory for the
// arrays of pointers that some batches need.
struct Launch {
  const Api& api;
  cublasHandle_t handle;
  const blas::Problem& problem;
  const blas::Buffers& buffers;
  const void** pointers;
  const Device& device;
  cudaStream_t stream;
};

Status run(const Launch& launch);

}  // namespace tcgemm::cublas
