// The second kernel of split K, for every family: adds the partial products of all splits in order, so that the result
// does not depend on which block finished first, and has alpha and beta.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/implementation.h"

namespace tcgemm {

// Partial products of one call in the workspace: [set][split][batch][m][n] of float32 (of what sums are, where those
// are int32 or float64). A gated forward product has two sets, for Z and for Z_up; any other has one.
struct SplitSums {
  const void* data;
  int num_splits;

  static int num_sets(const Problem& p) { return p.has_two_b() ? 2 : 1; }
  static int64_t set_elements(const Problem& p, int num_splits) { return num_splits * p.batch * p.m * p.n; }
  static int64_t bytes(const Problem& p, int num_splits) {
    return dtype_bytes(dtype(p)) * num_sets(p) * set_elements(p, num_splits);
  }
  static DType dtype(const Problem& p) {
    return p.compute == Compute::kS32 ? DType::kS32 : p.compute == Compute::kF64 ? DType::kF64 : DType::kF32;
  }
};

// What a program has to bring for it.
KernelSource split_reduction_source(const Problem& problem, int num_splits, const Device& device);

// `starts_early`: on compute capability 9.0, begins while the kernel before it ends; that one then
// must have made its writes visible by ending, as every kernel does.
Status launch_split_reduction(const Problem& problem, const Buffers& buffers, const SplitSums& sums,
                              const Device& device, bool starts_early, cudaStream_t stream);

}  // namespace tcgemm
