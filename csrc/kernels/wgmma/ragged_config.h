// Configs of wgmma's grouped products: the one list of what is instantiated.
#pragma once

#include <type_traits>

#include "kernels/wgmma/config.h"

namespace tcgemm::wgmma_family {

// A config that loads whole boxes, past the end of a group where it lies inside one: of form rows a single
// box for each k block, of form contraction a whole k block, whose rows of no use its consumers overwrite
// with zeros. Others load what a group has of rows in as many boxes as that takes.
template <typename Base>
struct WholeBoxes : Base {};
template <typename Config>
inline constexpr bool kLoadsWholeBoxes = false;
template <typename Base>
inline constexpr bool kLoadsWholeBoxes<WholeBoxes<Base>> = true;

template <bool kWhole, typename Base>
using RaggedConfig = std::conditional_t<kWhole, WholeBoxes<Base>, Base>;

// X(name, tile_m, tile_n, cluster_m, ping_pong, swapped, whole), as in config.h; swapped ones are of form
// rows, where tile_n is the most tokens of a tile, the others of form contraction. Names of those that load
// whole boxes end in w.
#define TCGEMM_WGMMA_RAGGED_CONFIGS(X)                          \
  X("128x256x64_c2x1x1_co_t", 128, 256, 2, false, true, false)  \
  X("128x256x64_c1x1x1_co_t", 128, 256, 1, false, true, false)  \
  X("128x64x64_c1x1x1_co_t", 128, 64, 1, false, true, false)    \
  X("128x256x64_c2x1x1_co", 128, 256, 2, false, false, false)   \
  X("128x256x64_c2x1x1_co_t_w", 128, 256, 2, false, true, true) \
  X("128x256x64_c2x1x1_co_w", 128, 256, 2, false, false, true)  \
  X("128x128x64_c2x1x1_pp_w", 128, 128, 2, true, false, true)

// The same for configs that run any epilogue of form rows, of weights with rows of K: a warpgroup has 128
// rows of the tile, of a gated product 64 of each of its matrices. Those whose blocks share nothing also
// gather their tokens, each its own.
#define TCGEMM_WGMMA_RAGGED_FUSED_CONFIGS(X)            \
  X("256x128x64_c2x1x1_co_t", 256, 128, 2, false, true) \
  X("256x128x64_c1x1x1_co_t", 256, 128, 1, false, true)

}  // namespace tcgemm::wgmma_family
