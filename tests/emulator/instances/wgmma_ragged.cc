// The wgmma kernels of grouped products for EMULATED_MMA and EMULATED_OPERANDS.
#include "kernels/wgmma/config.h"
#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {
namespace {

// Tokens that are K-major are of form rows; only weights that are not have an epilogue.
template <typename Config, bool kIsFused>
bool add_config() {
  using Operands = EMULATED_OPERANDS;
  if constexpr (Config::kSwapped == Operands::B::kIsKMajor && !(kIsFused && Operands::A::kIsKMajor)) {
    return add_ragged<Config, EMULATED_MMA, Operands, std::conditional_t<kIsFused, Fused, Bare>>();
  }
  return false;
}

const bool added[] = {
#define EMULATED_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, fused) \
  add_config<Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, fused>(),
    TCGEMM_WGMMA_RAGGED_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
