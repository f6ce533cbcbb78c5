// Sums and products of rows on the host: the contract of core/rows_problem.h.
#pragma once

#include "core/rows_problem.h"

namespace tcgemm {

// The `stream` of its launch() is a const Executor* (cpu/executor.h).
const RowsImplementation* host_rows();

}  // namespace tcgemm
