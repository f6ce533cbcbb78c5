// Shapes of instructions and tiles, and what kernels are instantiated for.
#pragma once

namespace tcgemm::wmma {

struct M16N16K16 {
  static constexpr int kMmaM = 16, kMmaN = 16, kMmaK = 16;
};
struct M32N8K16 {
  static constexpr int kMmaM = 32, kMmaN = 8, kMmaK = 16;
};
struct M8N32K16 {
  static constexpr int kMmaM = 8, kMmaN = 32, kMmaK = 16;
};
struct M16N16K8 {
  static constexpr int kMmaM = 16, kMmaN = 16, kMmaK = 8;
};
struct M8N8K4 {
  static constexpr int kMmaM = 8, kMmaN = 8, kMmaK = 4;
};

template <typename Mma, bool kSaturate_ = false>
struct NaiveConfig : Mma {
  static constexpr bool kSaturate = kSaturate_;
};

// kMinBlocks is what the registers and shared memory of a multiprocessor hold.
struct Tile128x128x32 {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile64x64x32 {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 32, kWarpM = 32, kWarpN = 32;
  static constexpr int kStages = 4, kMinBlocks = 4;
};
struct Tile128x128x64 {  // 8-bit elements
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 64, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile128x128x16 {  // TF32
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile64x128x16 {  // float64
  static constexpr int kTileM = 64, kTileN = 128, kTileK = 16, kWarpM = 32, kWarpN = 64;
  static constexpr int kStages = 3, kMinBlocks = 2;
};

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
