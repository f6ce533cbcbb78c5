// The wgmma kernels of some configs for one instruction and its operands.
//   EMULATED_MMA, EMULATED_OPERANDS   their types
#include "chosen.h"
#include "instances/wgmma_instances.h"
#include "kernels/wgmma/config.h"

namespace tcgemm::wgmma_family {
namespace {

template <bool kIsChosen, typename Config>
bool add_chosen() {
  if constexpr (kIsChosen) return add<Config, EMULATED_MMA, EMULATED_OPERANDS>();
  return false;
}

const bool added[] = {
#define EMULATED_ENTRY(name, ...) add_chosen<emulator::is_chosen(name), Config<__VA_ARGS__>>(),
    TCGEMM_WGMMA_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
