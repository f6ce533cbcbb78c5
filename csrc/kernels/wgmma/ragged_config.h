// Configs of wgmma's grouped products: the one list of what is instantiated.
#pragma once

#include "kernels/wgmma/config.h"

namespace tcgemm::wgmma_family {

// X(name, tile_m, tile_n, cluster_m, cluster_n, swapped, fused), as in config.h, all cooperative; swapped ones are of
// form rows, where tile_n is the most tokens of a tile, the others of form contraction. Fused ones run any epilogue of
// form rows, of weights with rows of K, and may gather their tokens: a warpgroup has 128 rows of the tile, of a gated
// product 64 of each of its matrices.
#define TCGEMM_WGMMA_RAGGED_CONFIGS(X)                     \
  X("128x256x64_c2x1x1_co_t", 128, 256, 2, 1, true, false) \
  X("128x64x64_c1x1x1_co_t", 128, 64, 1, 1, true, false)   \
  X("128x256x64_c2x1x1_co", 128, 256, 2, 1, false, false)  \
  X("256x128x64_c1x2x1_co_t", 256, 128, 1, 2, true, true)

}  // namespace tcgemm::wgmma_family
