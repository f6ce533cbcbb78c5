// Tile shapes of the family. A config by name is a tile with K counted in elements, so that one
// tile type serves every element size: Tile<128, 256, 128, ...> is 128x256x64 for bf16 and
// 128x256x128 for s8.
#pragma once

namespace tcgemm::mma {

template <int tile_m, int tile_n, int tile_k_bytes, int warp_m, int warp_n, int stages, int min_blocks_per_sm,
          bool has_epilogue>
struct Tile {
  static constexpr int kTileM = tile_m;
  static constexpr int kTileN = tile_n;
  static constexpr int kTileKBytes = tile_k_bytes;
  static constexpr int kWarpM = warp_m;
  static constexpr int kWarpN = warp_n;
  static constexpr int kStages = stages;
  // What registers must leave room for; shared memory may allow less on a given device.
  static constexpr int kMinBlocksPerSm = min_blocks_per_sm;
  // Whether kernels with an epilogue are built; else one goes through the workspace and a second kernel.
  static constexpr bool kHasEpilogue = has_epilogue;

  static constexpr int kWarpsM = kTileM / kWarpM;
  static constexpr int kWarpsN = kTileN / kWarpN;
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;
  static constexpr int kStageBytes = (kTileM + kTileN) * kTileKBytes;
  static constexpr int kStagesBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kStagesBytes + kStages * 8;  // and a barrier for each stage

  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0, "warps must cover the tile exactly");
  static_assert(kTileKBytes == 64 || kTileKBytes == 128, "K-major rows are swizzled in lines of 128 bytes");
  static_assert(kStages >= 3, "a copy needs a stage that is neither read nor awaited");
};

// One block on an SM: the least traffic to shared memory and L2.
using Tile256Stages3 = Tile<128, 256, 128, 64, 64, 3, 1, true>;
using Tile256TallStages3 = Tile<256, 128, 128, 64, 64, 3, 1, false>;
// Two blocks on an SM, each hiding the other's barriers and epilogue.
using Tile128Stages4 = Tile<128, 128, 64, 64, 64, 4, 2, false>;
// Small products: four times as many blocks.
using Tile64Stages4 = Tile<64, 64, 128, 32, 32, 4, 3, true>;

// A tile together with the layouts of its operands.
template <typename TileType, bool a_transposed, bool b_transposed>
struct Config : TileType {
  static constexpr bool kATransposed = a_transposed;
  static constexpr bool kBTransposed = b_transposed;
};

}  // namespace tcgemm::mma
