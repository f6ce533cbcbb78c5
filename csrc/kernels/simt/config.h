// Tile shapes of the simt kernels.
#pragma once

namespace tcgemm::simt {

struct NaiveConfig {
  static constexpr int kTileM = 8;
  static constexpr int kTileN = 32;  // one warp
  static constexpr int kThreads = kTileM * kTileN;
};

// kMinBlocks is what the registers of kThreads threads leave room for on a multiprocessor.
struct Tile128x64x16 {
  static constexpr int kTileM = 128, kTileN = 64, kTileK = 16, kThreadM = 8, kThreadN = 8;
  static constexpr int kThreads = 128, kMinBlocks = 3;
};
struct Tile128x128x16 {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kThreadM = 8, kThreadN = 8;
  static constexpr int kThreads = 256, kMinBlocks = 1;
};
// 8- and 16-byte elements.
struct Tile64x64x8 {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 8, kThreadM = 8, kThreadN = 4;
  static constexpr int kThreads = 128, kMinBlocks = 3;
};
struct Tile64x64x8Wide {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 8, kThreadM = 4, kThreadN = 4;
  static constexpr int kThreads = 256, kMinBlocks = 1;
};

template <typename Tile, bool kATransposed_, bool kBTransposed_>
struct TiledConfig : Tile {
  static constexpr bool kATransposed = kATransposed_, kBTransposed = kBTransposed_;
};

}  // namespace tcgemm::simt
