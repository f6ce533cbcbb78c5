// What passes between the implementations (mma_sync.cc, ragged.cc) and the launchers (launch.cc, ragged_launch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/implementation.h"
#include "core/problem.h"
#include "kernels/common/kernel.h"
#include "kernels/mma_sync/geometry.h"
#include "kernels/mma_sync/instance.h"
#include "tile/matrix.cuh"

namespace tcgemm::mma {

struct Call {
  Kernel* kernel;
  Geometry geometry;
  EpilogueKind epilogue;
  bool has_tma;  // the device's kernels copy by TMA what they can
  const Problem* problem;
  const Buffers* buffers;
  int num_splits;  // > 1: D is the partial products of so many splits of K, one batch after another
  cudaStream_t stream;
};

// Launches call.kernel, which is of call.geometry and of kind call.epilogue.
Status launch_product(const Call& call);

// The operand in bytes, and the largest copy (16, 8, 4, 2 or 1 bytes) that divides its address,
// every stride in use and the contiguous extent: such a copy is inside or outside as a whole.
BatchedMatrix<char> in_bytes(const Problem& problem, const Operand& operand, const void* data, int64_t rows,
                             int64_t contiguous, int* granularity);

}  // namespace tcgemm::mma
