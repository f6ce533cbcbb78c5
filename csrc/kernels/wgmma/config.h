// Configs of the wgmma family: the lists of what is instantiated.
#pragma once

#include "kernels/wgmma/geometry.h"

namespace tcgemm::wgmma_family {

// A shape as a type, for kernels.
template <int kTileM_, int kTileN_, int kClusterM_, int kClusterN_, int kClusterK_, bool kPingPong_, bool kSwapped_>
struct Config {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kClusterK = kClusterK_;
  static constexpr bool kPingPong = kPingPong_, kSwapped = kSwapped_;
  static constexpr Shape kShape{kTileM, kTileN, kClusterM, kClusterN, kClusterK, kPingPong, kSwapped};
  static constexpr int kClusterSize = kShape.cluster_size();
  static constexpr int kMulticast = kClusterM * kClusterN;  // CTAs of a cluster that receive each other's TMA loads
  static constexpr int kConsumers = kShape.consumers();
  static constexpr int kThreads = kShape.threads();
  static constexpr int kTilesAlongLonger = kShape.tiles_along_longer();
  static constexpr bool kRunsGated = kShape.runs_gated();
  // A cluster's tiles of a square of a symmetric D, along M and along N; one of the two is 1.
  static constexpr int kSquareM = kShape.symmetric_side() / (kTileM * kClusterM);
  static constexpr int kSquareN = kShape.symmetric_side() / (kTileN * kClusterN);
  // Stores a tile transposed.
  using Mirrored = Config<kTileM, kTileN, kClusterM, kClusterN, kClusterK, kPingPong, !kSwapped>;
  static_assert(kConsumers >= 2, "a cooperative tile has at least 128 rows");
  static_assert(kMulticast == 1 || kClusterK == 1, "the CTAs of a cluster multicast operands or split K");
};

// X(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped)
//
// The first is the default. `name` is tile_m x tile_n x 64 (K in 16-bit elements), the cluster, then pp (ping-pong) or
// co (cooperative), then t when swapped.
#define TCGEMM_WGMMA_CONFIGS(X)                               \
  X("128x256x64_c2x1x1_co", 128, 256, 2, 1, 1, false, false)  \
  X("192x192x64_c1x1x1_co", 192, 192, 1, 1, 1, false, false)  \
  X("192x192x64_c2x1x1_co", 192, 192, 2, 1, 1, false, false)  \
  X("192x176x64_c1x1x1_co", 192, 176, 1, 1, 1, false, false)  \
  X("192x176x64_c1x2x1_co_t", 192, 176, 1, 2, 1, false, true) \
  X("192x160x64_c1x2x1_co_t", 192, 160, 1, 2, 1, false, true) \
  X("256x160x64_c1x2x1_co_t", 256, 160, 1, 2, 1, false, true) \
  X("256x128x64_c1x1x1_co_t", 256, 128, 1, 1, 1, false, true) \
  X("128x256x64_c1x1x1_co", 128, 256, 1, 1, 1, false, false)  \
  X("128x256x64_c1x2x1_co", 128, 256, 1, 2, 1, false, false)  \
  X("128x256x64_c1x1x1_co_t", 128, 256, 1, 1, 1, false, true) \
  X("128x224x64_c2x1x1_co", 128, 224, 2, 1, 1, false, false)  \
  X("128x224x64_c2x1x1_co_t", 128, 224, 2, 1, 1, false, true) \
  X("192x128x64_c1x1x1_co", 192, 128, 1, 1, 1, false, false)  \
  X("128x192x64_c1x1x1_co", 128, 192, 1, 1, 1, false, false)  \
  X("128x192x64_c2x1x1_co", 128, 192, 2, 1, 1, false, false)  \
  X("128x192x64_c2x1x1_co_t", 128, 192, 2, 1, 1, false, true) \
  X("128x160x64_c2x1x1_pp", 128, 160, 2, 1, 1, true, false)   \
  X("128x144x64_c1x1x1_co_t", 128, 144, 1, 1, 1, false, true) \
  X("128x112x64_c1x1x1_co_t", 128, 112, 1, 1, 1, false, true) \
  X("128x128x64_c1x1x1_co", 128, 128, 1, 1, 1, false, false)  \
  X("128x128x64_c2x2x1_co", 128, 128, 2, 2, 1, false, false)  \
  X("128x128x64_c1x1x1_pp", 128, 128, 1, 1, 1, true, false)   \
  X("128x128x64_c1x2x1_pp", 128, 128, 1, 2, 1, true, false)   \
  X("128x128x64_c2x1x1_pp", 128, 128, 2, 1, 1, true, false)   \
  X("64x256x64_c1x1x1_pp", 64, 256, 1, 1, 1, true, false)     \
  X("64x256x64_c1x1x1_pp_t", 64, 256, 1, 1, 1, true, true)    \
  X("64x192x64_c1x1x1_pp", 64, 192, 1, 1, 1, true, false)     \
  X("64x192x64_c1x1x1_pp_t", 64, 192, 1, 1, 1, true, true)    \
  X("64x192x64_c4x1x1_pp", 64, 192, 4, 1, 1, true, false)     \
  X("192x64x64_c1x4x1_co", 192, 64, 1, 4, 1, false, false)    \
  X("64x144x64_c8x1x1_pp_t", 64, 144, 8, 1, 1, true, true)    \
  X("128x80x64_c1x1x1_co_t", 128, 80, 1, 1, 1, false, true)   \
  X("128x64x64_c1x1x2_co", 128, 64, 1, 1, 2, false, false)    \
  X("64x128x64_c1x1x1_pp", 64, 128, 1, 1, 1, true, false)     \
  X("64x128x64_c1x1x1_pp_t", 64, 128, 1, 1, 1, true, true)    \
  X("64x128x64_c1x1x2_pp_t", 64, 128, 1, 1, 2, true, true)    \
  X("64x128x64_c2x1x1_pp", 64, 128, 2, 1, 1, true, false)     \
  X("64x128x64_c4x2x1_pp", 64, 128, 4, 2, 1, true, false)     \
  X("64x128x64_c4x1x1_pp_t", 64, 128, 4, 1, 1, true, true)    \
  X("64x96x64_c1x1x1_pp", 64, 96, 1, 1, 1, true, false)       \
  X("64x96x64_c1x1x1_pp_t", 64, 96, 1, 1, 1, true, true)      \
  X("64x80x64_c1x1x1_pp_t", 64, 80, 1, 1, 1, true, true)      \
  X("64x64x64_c1x1x1_pp", 64, 64, 1, 1, 1, true, false)       \
  X("64x64x64_c1x1x1_pp_t", 64, 64, 1, 1, 1, true, true)      \
  X("64x64x64_c1x1x2_pp", 64, 64, 1, 1, 2, true, false)       \
  X("64x64x64_c1x1x4_pp", 64, 64, 1, 1, 4, true, false)       \
  X("64x64x64_c1x4x1_pp", 64, 64, 1, 4, 1, true, false)       \
  X("128x32x64_c1x1x2_co", 128, 32, 1, 1, 2, false, false)    \
  X("128x16x64_c1x1x4_co", 128, 16, 1, 1, 4, false, false)    \
  X("128x16x64_c1x1x4_co_t", 128, 16, 1, 1, 4, false, true)   \
  X("64x32x64_c1x1x1_pp_t", 64, 32, 1, 1, 1, true, true)      \
  X("64x32x64_c1x1x4_pp_t", 64, 32, 1, 1, 4, true, true)      \
  X("64x16x64_c1x1x1_pp_t", 64, 16, 1, 1, 1, true, true)      \
  X("64x16x64_c1x1x2_pp_t", 64, 16, 1, 1, 2, true, true)

// Those of grouped products, all cooperative. Swapped ones are of form rows, where tile_n is the most tokens of a tile,
// the others of form contraction. Where blocks share the weights a warpgroup has 128 rows of the tile, of a gated
// product 64 of each of its matrices. Weights lie with a row for each k there, and tokens may be gathered, or, of gated
// products, with a row for each column.
#define TCGEMM_WGMMA_RAGGED_CONFIGS(X)                        \
  X("128x256x64_c2x1x1_co_t", 128, 256, 2, 1, 1, false, true) \
  X("128x64x64_c1x1x1_co_t", 128, 64, 1, 1, 1, false, true)   \
  X("128x256x64_c2x1x1_co", 128, 256, 2, 1, 1, false, false)  \
  X("256x128x64_c1x2x1_co_t", 256, 128, 1, 2, 1, false, true)

}  // namespace tcgemm::wgmma_family
