// The wgmma kernels of grouped products for EMULATED_MMA and EMULATED_OPERANDS.
#include "instances/wgmma_instances.h"
#include "kernels/wgmma/config.h"

namespace tcgemm::wgmma_family {
namespace {

// Tokens that are K-major are of form rows; only weights that are not are shared by blocks.
template <typename Config>
bool add_config() {
  using Operands = EMULATED_OPERANDS;
  if constexpr (Config::kSwapped == Operands::B::kIsKMajor && !(Config::kClusterN > 1 && Operands::A::kIsKMajor)) {
    return add_ragged<Config, EMULATED_MMA, Operands>();
  }
  return false;
}

const bool added[] = {
#define EMULATED_ENTRY(name, ...) add_config<Config<__VA_ARGS__>>(),
    TCGEMM_WGMMA_RAGGED_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
