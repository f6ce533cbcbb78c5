// What of the family is compiled when the package is installed; the programs that use it bring all else.
#pragma once

// X(tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped): configs, bare, for each instruction and for
// operands of every major that it takes. They are those that the shipped table names most often, one for few rows among
// them, so that an installation that cannot compile kernels still has one for every product.
#define TCGEMM_WGMMA_PREBUILT(X)    \
  X(128, 128, 1, 1, 1, true, false) \
  X(128, 128, 2, 1, 1, true, false) \
  X(64, 16, 1, 1, 1, true, true)
