// Tiles of the mma_sync family: the one list of them.
#pragma once

#include "kernels/mma_sync/geometry.h"

namespace tcgemm::mma {

// A tile as a type, for kernels.
template <int kTileM_, int kTileN_, int kTileKBytes_, int kWarpM_, int kWarpN_, int kStages_, int kMinBlocksPerSm_>
struct Config {
  static constexpr Tile kTile{kTileM_, kTileN_, kTileKBytes_, kWarpM_, kWarpN_, kStages_, kMinBlocksPerSm_};
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileKBytes = kTileKBytes_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kStages = kStages_, kMinBlocksPerSm = kMinBlocksPerSm_;
  static constexpr int kWarpsM = kTile.warps_m(), kWarpsN = kTile.warps_n(), kThreads = kTile.threads();
  // Tiles of a square of a symmetric D, along M and along N; one of the two is 1.
  static constexpr int kSquareM = kTile.symmetric_side() / kTileM, kSquareN = kTile.symmetric_side() / kTileN;

  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0, "warps must cover the tile exactly");
  static_assert(kSquareM * kTileM == kSquareN * kTileN, "tiles must cover a square of a symmetric D exactly");
  static_assert(kTileKBytes == 64 || kTileKBytes == 128, "K-major rows are swizzled in lines of 128 bytes");
  static_assert(kStages >= 3, "a copy needs a stage that is neither read nor awaited");
};

// X(tile_m, tile_n, tile_k_bytes, warp_m, warp_n, stages, min_blocks_per_sm, of_every_type)
//
// In order of preference. of_every_type: a config of each instruction, not only of those with has_every_tile.
//
// The first two have one block on an SM: the least traffic to shared memory and L2. Of the third there are two, each
// hiding the other's barriers and epilogue. The last is for small products: four times as many blocks.
#define TCGEMM_MMA_SYNC_TILES(X)        \
  X(128, 256, 128, 64, 64, 3, 1, true)  \
  X(256, 128, 128, 64, 64, 3, 1, false) \
  X(128, 128, 64, 64, 64, 4, 2, true)   \
  X(64, 64, 128, 32, 32, 4, 3, true)

// The one tile of grouped products.
inline constexpr Tile kRaggedTile{128, 128, 64, 64, 64, 4, 2};

}  // namespace tcgemm::mma
