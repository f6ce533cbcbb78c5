// Kernel arguments.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.cuh"
#include "epilogue/function_params.h"
#include "tile/grid.cuh"
#include "tile/matrix.cuh"
#include "tile/numeric.cuh"
#include "tile/tensor_map.cuh"

namespace tcgemm::mma {

// What a kernel does with its sums before they are D.
using Bare = epilogue::Identity<float, void>;
using Scaled = epilogue::AlphaBetaC<int32_t, int32_t>;  // of integers: all but a function, and nothing
using epilogue::Function;

struct Params {
  tile::TensorMap a_map, b_map;      // of the tiles of a stage; only where TensorCopies copies them
  BatchedMatrix<char> a, b;          // ld and strides in bytes
  int a_granularity, b_granularity;  // 16, 8, 4 or the element's bytes: divides addresses, strides and extents
  void* d;
  FloatType out;        // unless D is s32
  bool stores_vectors;  // 16-byte stores of D are aligned and never straddle rows
  int64_t batch, m, n;
  int64_t k, k_per_split;
  TileGrid grid;
  uint32_t num_works;  // tiles times splits: the blocks
};

// One tile of one split. The sums of a split go to entries split * batch + batch_idx of D.
struct Work {
  int split_idx, batch_idx;
  uint32_t m_idx, n_idx;  // up to a tile past 2^31
  int64_t k_begin;
  int k;  // 0 where the last splits have nothing left

  __device__ __forceinline__ static Work make(const Params& params, uint32_t work_idx, int tile_m, int tile_n) {
    const uint32_t num_tiles = static_cast<uint32_t>(params.grid.num_tiles());
    Work work;
    work.split_idx = static_cast<int>(work_idx / num_tiles);
    const TileCoord tile = params.grid.at(work_idx % num_tiles);
    work.batch_idx = static_cast<int>(tile.batch_idx);
    work.m_idx = static_cast<uint32_t>(tile.tile_m_idx) * tile_m;
    work.n_idx = static_cast<uint32_t>(tile.tile_n_idx) * tile_n;
    work.k_begin = work.split_idx * params.k_per_split;
    const int64_t k_left = params.k - work.k_begin;
    work.k = static_cast<int>(k_left < params.k_per_split ? (k_left > 0 ? k_left : 0) : params.k_per_split);
    return work;
  }

  __device__ __forceinline__ int num_k_tiles(int tile_k) const {
    return static_cast<int>((int64_t{k} + tile_k - 1) / tile_k);
  }
};

}  // namespace tcgemm::mma
