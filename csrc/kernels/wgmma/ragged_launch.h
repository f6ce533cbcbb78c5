// What passes between the implementation (ragged.cc) and the instances (ragged_instance_*.cu).
#pragma once

#include <vector>

#include "core/ragged_problem.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {

// One batch entry.
struct RaggedCall {
  const RaggedProblem* problem;
  RaggedBuffers buffers;
  cudaStream_t stream;
};

using RaggedLaunchFunction = Status (*)(const RaggedCall&);

// Launch functions in the order of TCGEMM_WGMMA_RAGGED_CONFIGS, null where a config has another form
// or layout: one table for each element type and, of form rows, layout of the weights (0: K-major,
// 1: rows of K). Those with rows of K hold the contraction too.
const std::vector<RaggedLaunchFunction>& ragged_bf16_table_0();
const std::vector<RaggedLaunchFunction>& ragged_bf16_table_1();
const std::vector<RaggedLaunchFunction>& ragged_f16_table_0();
const std::vector<RaggedLaunchFunction>& ragged_f16_table_1();

// The same in the order of TCGEMM_WGMMA_RAGGED_FUSED_CONFIGS.
const std::vector<RaggedLaunchFunction>& ragged_fused_bf16_table();
const std::vector<RaggedLaunchFunction>& ragged_fused_f16_table();

}  // namespace tcgemm::wgmma_family
