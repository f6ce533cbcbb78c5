// The mma_sync kernels of some tiles for one instruction, in all layouts.
//   EMULATED_A, EMULATED_B   elements of the operands
//   EMULATED_MMA   the instruction's types
#include "chosen.h"
#include "instances/mma_sync_instances.h"
#include "kernels/mma_sync/config.h"

namespace tcgemm::mma {
namespace {

using Mma = EMULATED_MMA;

template <bool kIsChosen, typename Config>
bool add_chosen() {
  if constexpr (kIsChosen) {
    add_layouts<EMULATED_A, EMULATED_B>([](auto operands) {
      using Operands = decltype(operands);
      if constexpr (std::is_same_v<Mma::Accumulator, int32_t>) {
        add<Config, Mma, Operands, Scaled>();
      } else {
        add<Config, Mma, Operands, Bare>();
      }
    });
  }
  return kIsChosen;
}

const bool added[] = {
#define EMULATED_ENTRY(m, n, k_bytes, warp_m, warp_n, stages, min_blocks, every_type) \
  add_chosen<emulator::is_chosen(#m "x" #n), Config<m, n, k_bytes, warp_m, warp_n, stages, min_blocks>>(),
    TCGEMM_MMA_SYNC_TILES(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::mma
