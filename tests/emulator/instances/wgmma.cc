// One table of wgmma kernels, as csrc/kernels/wgmma/instance_*.cu have them, for some of the configs.
//   EMULATED_TABLE, EMULATED_IN, EMULATED_TRANS_A, EMULATED_TRANS_B   the table, and what it is of
//   EMULATED_FUSED   whether with the kernels that run epilogues
#include "chosen.h"
#include "kernels/wgmma/launch.cuh"

namespace tcgemm::wgmma_family {

template <bool kIsChosen, typename Config, bool kAnyEpilogue>
LaunchFunction function() {
  if constexpr (kIsChosen) {
    return launch_config < Config, EMULATED_IN, EMULATED_TRANS_A, EMULATED_TRANS_B, kAnyEpilogue && EMULATED_FUSED > ;
  } else {
    return [](const Call&) { return Status::internal("this config was not compiled for emulation"); };
  }
}

const std::vector<LaunchFunction>& EMULATED_TABLE() {
  static const std::vector<LaunchFunction> table{
#define EMULATED_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any)             \
  function<emulator::is_chosen(name), Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, \
           any>(),
      TCGEMM_WGMMA_CONFIGS(EMULATED_ENTRY)};
  return table;
}

}  // namespace tcgemm::wgmma_family
