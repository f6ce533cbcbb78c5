// The mma_sync kernels of grouped products for one instruction: EMULATED_A, EMULATED_B, EMULATED_MMA.
#include "instances/mma_sync_instances.h"
#include "kernels/mma_sync/config.h"

namespace tcgemm::mma {
namespace {

constexpr Tile kTile = kRaggedTile;
using RaggedConfig =
    Config<kTile.m, kTile.n, kTile.k_bytes, kTile.warp_m, kTile.warp_n, kTile.stages, kTile.min_blocks_per_sm>;

const bool added = [] {
  add_layouts<EMULATED_A, EMULATED_B>(
      [](auto operands) { add_ragged<RaggedConfig, EMULATED_MMA, decltype(operands)>(); });
  return true;
}();

}  // namespace
}  // namespace tcgemm::mma
