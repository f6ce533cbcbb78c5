// What of the family is compiled when the package is installed; the programs that use it bring all else.
#pragma once

// X(tile_m, tile_n, tile_k_bytes, warp_m, warp_n, stages, min_blocks_per_sm): tiles, bare, for products of f16, bf16
// and TF32 with sums in f32 in every layout: one, so that an installation that cannot compile kernels has one of every
// such product.
#define TCGEMM_MMA_SYNC_PREBUILT(X) X(64, 64, 128, 32, 32, 4, 3)
