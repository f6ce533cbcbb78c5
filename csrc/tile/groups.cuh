// The groups of a grouped product among the arguments of a kernel.
#pragma once

#include <cstdint>

namespace tcgemm {

// See core/ragged_problem.h.
struct Groups {
  const int32_t* sizes;
  const int32_t* offset;
  int32_t num_sizes, count;
  int32_t tokens;
};

}  // namespace tcgemm
