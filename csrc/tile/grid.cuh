// Which output tile a block computes.
//
// Tiles are numbered over (batch, m, n) in one range, so that no CUDA grid limit on y or z
// applies; every launcher keeps it below 2^31, and divisions of 32 bits are the short ones. Inside a batch entry, tiles
// run down `kGroupM` rows before moving one column right: neighboring blocks then share both an A row panel and a B
// column panel in L2.
#pragma once

#include <cstdint>

namespace tcgemm {

struct TileCoord {
  int64_t batch_idx, tile_m_idx, tile_n_idx;
};

struct TileGrid {
  static constexpr uint32_t kGroupM = 8;

  int64_t batch;
  uint32_t tiles_m, tiles_n;

  __host__ __device__ static TileGrid make(int64_t batch, int64_t m, int64_t n, int64_t tile_m, int64_t tile_n) {
    return {batch, static_cast<uint32_t>((m + tile_m - 1) / tile_m), static_cast<uint32_t>((n + tile_n - 1) / tile_n)};
  }

  __host__ __device__ int64_t num_tiles() const { return batch * tiles_m * int64_t{tiles_n}; }

  __device__ __forceinline__ TileCoord at(uint32_t tile_idx) const {
    const uint32_t tiles_per_batch = tiles_m * tiles_n;
    const uint32_t batch_idx = tile_idx / tiles_per_batch;
    const uint32_t in_batch = tile_idx - batch_idx * tiles_per_batch;
    const uint32_t group_tiles = kGroupM * tiles_n;
    const uint32_t group_idx = in_batch / group_tiles;
    const uint32_t first_m = group_idx * kGroupM;
    const uint32_t rows = tiles_m - first_m < kGroupM ? tiles_m - first_m : kGroupM;
    const uint32_t in_group = in_batch - group_idx * group_tiles;
    return {batch_idx, first_m + in_group % rows, in_group / rows};
  }
};

}  // namespace tcgemm
