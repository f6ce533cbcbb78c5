// Which tiles a block computes.
#pragma once

#include <cstdint>

#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/traits.cuh"
#include "tile/triangle.cuh"

namespace tcgemm::wgmma_family {

// Where a tile of the persistent walk lies.
struct Work {
  int32_t m_idx, n_idx;  // first row and column of this block's tile
  int32_t batch_idx, split_idx;
  int32_t first_k_block;  // of Params::k_blocks
  bool is_below;          // of a symmetric D: below the squares on the diagonal
};

// Walks the tiles of one cluster, groups being so wide (Shape::tiles_along_longer) that neighbors on the chip share
// panels or, where K is split, a split of K.
template <typename Config, typename Epilogue>
class TileWalk {
 public:
  // At the first tile. There is one for each cluster.
  __device__ __forceinline__ explicit TileWalk(const Params<Epilogue>& params) : rank_(cluster_rank<Config>()) {
    work_ = locate(params, first_tile(params));
  }

  __device__ __forceinline__ const Work& work() const { return work_; }
  __device__ __forceinline__ int32_t number() const { return number_; }  // of this tile in our walk

  // Goes on to the next tile; whether there is one.
  __device__ __forceinline__ bool next(const Params<Epilogue>& params) {
    ++number_;
    // Worked out anew: kept across a tile it would take a register that TF32's epilogues need.
    const int32_t tile_idx = first_tile(params) + number_ * (gridDim.x / Config::kClusterSize);
    if (tile_idx >= params.grid.num_tiles) return false;
    work_ = locate(params, tile_idx);
    return true;
  }

 private:
  // Where K is split over the grid, every eighth cluster takes the next tile; blocks without clusters lie side by
  // side. Also where clusters split K and the walk is less than eight tiles wide: else every eighth has a tile of
  // another row and column, and GPCs find nothing to share.
  static __device__ __forceinline__ int32_t first_tile(const Params<Epilogue>& params) {
    constexpr int32_t kApart = Config::kTilesAlongLonger;
    const int32_t cluster = blockIdx.x / Config::kClusterSize, clusters = gridDim.x / Config::kClusterSize;
    const bool is_narrow = Config::kClusterK > 1 && params.grid.longer < kApart && params.grid.num_tiles == clusters;
    if (Config::kClusterSize == 1 || (params.num_splits == 1 && !is_narrow)) return cluster;
    const int32_t place = cluster % kApart;
    return place * (clusters / kApart) + min(place, clusters % kApart) + cluster / kApart;
  }

  __device__ __forceinline__ Work locate(const Params<Epilogue>& params, int32_t tile_idx) const {
    Work work;
    const PersistentGrid& grid = params.grid;
    PersistentGrid::Place place = grid.at<Config::kTilesAlongLonger>(tile_idx);
    if constexpr (Epilogue::kIsSymmetric) {
      const auto tile =
          TriangleTile::at<Config::kSquareM, Config::kSquareN>(place.m_idx, place.n_idx, params.epilogue.side);
      place.m_idx = tile.m_idx;
      place.n_idx = tile.n_idx;
      work.is_below = tile.is_below;
    }
    const int32_t rank_m = rank_ % Config::kClusterM, rank_n = rank_ / Config::kClusterM % Config::kClusterN;
    work.m_idx = min((place.m_idx * Config::kClusterM + rank_m) * Config::kTileM, grid.last_m);
    work.n_idx = min((place.n_idx * Config::kClusterN + rank_n) * kColumns, grid.last_n);
    work.split_idx = grid.batch.divide(place.batch_idx);
    work.batch_idx = place.batch_idx - work.split_idx * params.batch;
    int32_t split = work.split_idx;
    if constexpr (Config::kClusterK > 1) split = split * Config::kClusterK + rank_;
    work.first_k_block = params.first_k_block + split * params.k_blocks;
    return work;
  }

  // Of D: of a gated product half of those that are multiplied.
  // mutant: tiles_too_far_apart
  static constexpr int32_t kColumns = Epilogue::kIsGated ? Config::kTileN / 2 : Config::kTileN;

  int32_t rank_, number_ = 0;
  Work work_;
};

}  // namespace tcgemm::wgmma_family
