// What a launch tells the kernel of many rows.
#pragma once

#include "kernels/packed/params.cuh"
#include "tile/tensor_map.cuh"

namespace tcgemm::packed {

// In `params` x is not used, and stages are those of WideTile. Maps of rank 4, as ptx/tma.cuh takes them: x in the
// order of order_kernel.cuh is (k, rows), the weight (its bytes, chunks or groups, tiles) as words of 32 bits.
struct WideParams {
  Params params;
  tile::TensorMap x, values, scales, zero_points;
};

}  // namespace tcgemm::packed
