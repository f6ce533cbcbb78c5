// The one argument of a kernel that takes its layouts as data.
#pragma once

#include <cstdint>

#include "tile/grid.cuh"
#include "tile/matrix.cuh"

namespace tcgemm {

// Single extents fit 32 bits; only their products need 64.
template <typename In, typename Outputs>
struct GemmArgs {
  BatchedMatrix<In> a, b;
  bool a_transposed, b_transposed;
  bool a_aligned, b_aligned;  // base, leading dimension and batch strides allow vector access
  int32_t m, n, k;
  TileGrid grid;
  Outputs outputs;
};

}  // namespace tcgemm
