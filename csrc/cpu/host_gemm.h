// The host implementation: the contract of core/problem.h in portable C++.
#pragma once

#include "core/implementation.h"

namespace tcgemm {

// The `stream` of its launch() is a const Executor* (cpu/executor.h).
const Implementation* host_gemm();

}  // namespace tcgemm
