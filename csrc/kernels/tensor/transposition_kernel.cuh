// Permutation of an array's modes: a tile of the two modes that are contiguous in the input and in the
// output goes through shared memory, so that both are read and written in whole lines.
//
// One block a tile, 256 threads, 4 to 33 KiB of shared memory.
#pragma once

#include <cstdint>

#include "kernels/tensor/transposition_params.cuh"
#include "tile/transpose.cuh"

namespace tcgemm::transposition {

template <typename T>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const void* __restrict__ in, void* __restrict__ out, const __grid_constant__ Params t) {
  using Tile = TransposeTile<T>;
  static_assert(Tile::kTile == tile_extent(sizeof(T)) && Tile::kThreads == kThreads, "as it is launched");
  __shared__ Tile tile;
  int64_t index = blockIdx.x;
  // Neighboring blocks write neighboring parts of the same lines of the output.
  const int tile_r_idx = static_cast<int>(index % t.tiles_r);
  index /= t.tiles_r;
  const int tile_c_idx = static_cast<int>(index % t.tiles_c);
  index /= t.tiles_c;
  int64_t in_offset = 0, out_offset = 0;
  for (int i = t.num_batch - 1; i >= 0; --i) {
    const int64_t position = index % t.batch[i].extent;
    index /= t.batch[i].extent;
    in_offset += position * t.batch[i].in_stride;
    out_offset += position * t.batch[i].out_stride;
  }
  const int64_t first_r = int64_t{tile_r_idx} * Tile::kTile, first_c = int64_t{tile_c_idx} * Tile::kTile;
  const int rows = static_cast<int>(min(int64_t{Tile::kTile}, t.rows - first_r));
  const int cols = static_cast<int>(min(int64_t{Tile::kTile}, t.cols - first_c));
  tile.load(static_cast<const T*>(in) + in_offset + first_r * t.in_row_stride + first_c, t.in_row_stride, rows, cols);
  __syncthreads();
  tile.store(static_cast<T*>(out) + out_offset + first_c * t.out_col_stride + first_r, t.out_col_stride, rows, cols);
}

}  // namespace tcgemm::transposition
