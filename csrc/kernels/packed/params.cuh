// What a launch tells the kernel.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"
#include "tile/segment_walk.cuh"

namespace tcgemm::packed {

struct Params {
  const void* x;
  const float* row_scales;  // null: none
  const uint8_t* values;
  const uint8_t* scales;
  const uint8_t* zero_points;
  const float* table;
  void* d;
  int32_t m, n, k;
  int32_t tiles, pieces, groups;                  // of a weight
  int32_t row_blocks, column_blocks, num_stages;  // row_blocks: not of experts
  Groups experts;
  FloatType out;
};

}  // namespace tcgemm::packed
