// Grouped products on the host: the contract of core/ragged_problem.h, one host GEMM a group.
#pragma once

#include "core/ragged_problem.h"

namespace tcgemm {

// The `stream` of its launch() is a const Executor* (cpu/executor.h).
const RaggedImplementation* host_ragged();

}  // namespace tcgemm
