// What of the family is compiled when the package is installed; the programs that use it bring all else.
#pragma once

// X(tile_m, tile_n, tile_k_bytes, warp_m, warp_n, stages, min_blocks_per_sm): tiles, bare, for products of f16, bf16
// and TF32 with sums in f32 in every layout. One for large products and one for small ones, so that an installation
// that cannot compile kernels still has them for what most programs multiply.
#define TCGEMM_MMA_SYNC_PREBUILT(X) \
  X(128, 256, 128, 64, 64, 3, 1)    \
  X(64, 64, 128, 32, 32, 4, 3)
