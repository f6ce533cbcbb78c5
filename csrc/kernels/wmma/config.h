// Shapes of instructions and tiles, and what kernels are instantiated for.
#pragma once

namespace tcgemm::wmma {

// Of an instruction.
template <int kMmaM_, int kMmaN_, int kMmaK_>
struct Shape {
  static constexpr int kMmaM = kMmaM_, kMmaN = kMmaN_, kMmaK = kMmaK_;
};
using M16N16K16 = Shape<16, 16, 16>;
using M32N8K16 = Shape<32, 8, 16>;
using M8N32K16 = Shape<8, 32, 16>;
using M16N16K8 = Shape<16, 16, 8>;
using M8N8K4 = Shape<8, 8, 4>;

template <typename Mma, bool kSaturate_ = false>
struct NaiveConfig : Mma {
  static constexpr bool kSaturate = kSaturate_;
};

// kMinBlocks is what the registers and shared memory of a multiprocessor hold.
template <int kTileM_, int kTileN_, int kTileK_, int kWarpM_, int kWarpN_, int kStages_, int kMinBlocks_>
struct Tile {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kStages = kStages_, kMinBlocks = kMinBlocks_;
};
using Tile128x128x32 = Tile<128, 128, 32, 64, 64, 4, 2>;
using Tile64x64x32 = Tile<64, 64, 32, 32, 32, 4, 4>;
using Tile128x128x64 = Tile<128, 128, 64, 64, 64, 4, 2>;  // 8-bit elements
using Tile128x128x16 = Tile<128, 128, 16, 64, 64, 4, 2>;  // TF32
using Tile64x128x16 = Tile<64, 128, 16, 32, 64, 3, 2>;    // float64

// An instantiation for one layout, whose tiles lie in shared memory as the operands do in global
// memory; and one for all layouts, which keeps K contiguous.
template <bool kATransposed, bool kBTransposed>
struct OneLayout {
  static constexpr bool kAAlongK = !kATransposed, kBAlongK = kBTransposed, kAnyLayout = false;
};
struct AnyLayout {
  static constexpr bool kAAlongK = true, kBAlongK = true, kAnyLayout = true;
};

template <typename Mma, typename Tile, typename Layout, bool kSaturate_ = false>
struct TiledConfig : Mma, Tile, Layout {
  static constexpr bool kSaturate = kSaturate_;
};

}  // namespace tcgemm::wmma
