// The wgmma kernels of some configs for one element type and layout.
//   EMULATED_IN, EMULATED_TRANS_A, EMULATED_TRANS_B   the element type and layout
//   EMULATED_FUSED   whether with the kernels that run epilogues
#include "chosen.h"
#include "kernels/common/kernel.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/kernel.cuh"

namespace tcgemm::wgmma_family {
namespace {

template <typename Config, typename Epilogue>
bool add() {
  return add_kernel(
      kernel_name(Config::kShape, EMULATED_NAME(EMULATED_IN), EMULATED_TRANS_A, EMULATED_TRANS_B, Epilogue::kFused),
      reinterpret_cast<const void*>(&kernel<Config, EMULATED_IN, EMULATED_TRANS_A, EMULATED_TRANS_B, Epilogue>));
}

template <bool kIsChosen, typename Config, bool kAnyEpilogue>
bool add_chosen() {
  if constexpr (kIsChosen) {
    if constexpr (kAnyEpilogue && EMULATED_FUSED) add<Config, Fused>();
    return add<Config, Bare>();
  } else {
    return false;
  }
}

const bool added[] = {
#define EMULATED_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any)               \
  add_chosen<emulator::is_chosen(name), Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, \
             any>(),
    TCGEMM_WGMMA_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
