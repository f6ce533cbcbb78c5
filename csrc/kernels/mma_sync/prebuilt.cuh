// The kernels of prebuilt.h. Included by prebuilt_*.cu, which compile side by side.
#pragma once

#include "kernels/mma_sync/config.h"
#include "kernels/mma_sync/instances.cuh"
#include "kernels/mma_sync/prebuilt.h"

namespace tcgemm::mma {

// All tiles for one instruction, which takes `Element` as `MmaElement`.
template <typename Element, typename MmaElement = Element>
bool add_prebuilt() {
  bool is_new = true;
  add_layouts<Element, Element>([&](auto operands) {
    using Mma = tile::Mma<MmaElement, MmaElement, float>;
#define TCGEMM_ENTRY(...) is_new &= add<Config<__VA_ARGS__>, Mma, decltype(operands), Bare>();
    TCGEMM_MMA_SYNC_PREBUILT(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  });
  return is_new;
}

}  // namespace tcgemm::mma
