// Kernel arguments.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.cuh"
#include "epilogue/function_params.h"
#include "tile/grid.cuh"
#include "tile/matrix.cuh"
#include "tile/numeric.cuh"
#include "tile/tensor_map.cuh"
#include "tile/triangle.cuh"

namespace tcgemm::mma {

// Epilogues: from accumulators to D.
using Bare = epilogue::Identity<float, void>;
using Scaled = epilogue::AlphaBetaC<int32_t, int32_t>;  // of integers: all but a function, and nothing
using epilogue::Function;

// Bare or Scaled of a D that is its own transpose. Only tiles on and below the diagonal are computed, and those below
// are stored a second time, transposed. `side`: how many squares (Tile::symmetric_side) D is long.
template <typename BaseType>
struct Symmetric : BaseType {
  using Base = BaseType;

  int32_t side;
};

template <typename Epilogue>
struct SymmetryOf {
  static constexpr bool kIsSymmetric = false;
  using Base = Epilogue;
};
template <typename BaseType>
struct SymmetryOf<Symmetric<BaseType>> {
  static constexpr bool kIsSymmetric = true;
  using Base = BaseType;
};

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

  template <typename Config, typename Epilogue>
  __device__ __forceinline__ static Work make(const Params& params, const Epilogue& epilogue, uint32_t work_idx) {
    const uint32_t num_tiles = static_cast<uint32_t>(params.grid.num_tiles());
    Work work;
    work.split_idx = static_cast<int>(work_idx / num_tiles);
    TileCoord tile = params.grid.at(work_idx % num_tiles);
    if constexpr (SymmetryOf<Epilogue>::kIsSymmetric) {
      const auto below = TriangleTile::at<Config::kSquareM, Config::kSquareN>(
          static_cast<int32_t>(tile.tile_m_idx), static_cast<int32_t>(tile.tile_n_idx), epilogue.side);
      tile.tile_m_idx = below.m_idx;
      tile.tile_n_idx = below.n_idx;
    }
    work.batch_idx = static_cast<int>(tile.batch_idx);
    work.m_idx = static_cast<uint32_t>(tile.tile_m_idx) * Config::kTileM;
    work.n_idx = static_cast<uint32_t>(tile.tile_n_idx) * Config::kTileN;
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
