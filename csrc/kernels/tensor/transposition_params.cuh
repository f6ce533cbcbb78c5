// What a launch tells transposition_kernel.cuh.
#pragma once

#include <cstdint>

namespace tcgemm::transposition {

inline constexpr int kThreads = 256, kMaxBatchModes = 4;

// Elements along each side of a tile.
constexpr int tile_extent(int64_t element_bytes) { return element_bytes <= 4 ? 64 : 32; }

struct Mode {
  int64_t extent, in_stride, out_stride;
};

// See transposition.h.
struct Params {
  int64_t rows, cols, in_row_stride, out_col_stride;
  int32_t tiles_r, tiles_c, num_batch;
  Mode batch[kMaxBatchModes];
};

}  // namespace tcgemm::transposition
