// What a launch tells the kernel.
#pragma once

#include <cstdint>

#include "epilogue/function_params.h"
#include "tile/groups.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::packed {

struct Params {
  const void* x;
  const float* row_scales;  // null: none
  const uint8_t* values;
  const uint8_t* scales;
  const uint8_t* zero_points;
  const float* column_scales;  // null: none
  const float* table;
  void* d;
  int32_t m, n, k;
  int32_t tiles, chunks, groups;                  // of a weight; tiles of each half of a gated one
  int32_t weight_tiles;                           // of a weight, both halves of a gated one
  int32_t row_blocks, column_blocks, num_stages;  // row_blocks: not of experts
  Groups experts;
  FloatType out;
};

// Epilogues of a kernel: Bare rounds the accumulators to D, Function is a generated one (epilogue/function.cuh).
struct Bare {};
template <typename CodeType>
using Function = epilogue::Function<CodeType>;

// Of weight_kernel.cuh.
struct WeightParams {
  const uint8_t* values;
  const void* scales;
  const int16_t* zero_points;  // null: `zero` is that of all
  const float* column_scales;  // null: none
  const float* table;          // null: there is none
  void* d;
  int64_t num_chunks;  // of all tiles
  int32_t k, chunks, groups, group_size;
  float zero;
};

}  // namespace tcgemm::packed
