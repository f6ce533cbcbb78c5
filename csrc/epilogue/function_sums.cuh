// Arguments of epilogue/function_kernel.cuh besides those of the function itself.
#pragma once

#include <cstdint>

#include "tile/divisor.cuh"

namespace tcgemm::epilogue {

// Products as [split][batch][m][n]; those of a gated product's second matrix follow.
struct FunctionSums {
  const void* data;
  int32_t num_splits;
  int64_t split_elements;
  // What warps have, along columns and rows, and how many there are.
  Divisor per_columns, per_rows;
  int32_t columns, rows;
  int64_t num_warps;
};

inline constexpr int kFunctionThreads = 256, kFunctionRows = 8, kFunctionGroups = 4,
                     kFunctionColumns = 8 * kFunctionGroups;

}  // namespace tcgemm::epilogue
