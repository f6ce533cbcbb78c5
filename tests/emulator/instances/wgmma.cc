// The wgmma kernels of some configs for one instruction and its operands.
//   EMULATED_MMA, EMULATED_OPERANDS   their types
//   EMULATED_FUSED   whether with the kernels that run epilogues
#include "chosen.h"
#include "kernels/wgmma/config.h"
#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {
namespace {

template <bool kIsChosen, typename Config, bool kIsFused>
bool add_chosen() {
  if constexpr (kIsChosen && kIsFused) add<Config, EMULATED_MMA, EMULATED_OPERANDS, Fused>();
  if constexpr (kIsChosen) return add<Config, EMULATED_MMA, EMULATED_OPERANDS, Bare>();
  return false;
}

const bool added[] = {
#define EMULATED_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any)               \
  add_chosen<emulator::is_chosen(name), Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, \
             any && EMULATED_FUSED>(),
    TCGEMM_WGMMA_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
