// The wgmma kernels of grouped products for EMULATED_IN; with EMULATED_TRANS_A == 0 also those of weights with rows of
// K next to each other.
#include "chosen.h"
#include "kernels/common/kernel.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/ragged_kernel.cuh"

namespace tcgemm::wgmma_family {
namespace {

template <typename Config, int kTransA, typename Epilogue>
bool add() {
  return add_kernel(ragged_kernel_name(Config::kShape, EMULATED_NAME(EMULATED_IN), kTransA, Epilogue::kFused),
                      reinterpret_cast<const void*>(&ragged_kernel<Config, EMULATED_IN, kTransA, Epilogue>));
}

template <typename Config, bool kIsFused>
bool add_all() {
  if constexpr (kIsFused) {
    return add<Config, 1, RaggedFused>();
  } else {
    if constexpr (Config::kSwapped && EMULATED_TRANS_A == 0) add<Config, 0, Bare>();
    return add<Config, 1, Bare>();
  }
}

const bool added[] = {
#define EMULATED_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped, fused) \
  add_all<Config<tile_m, tile_n, cluster_m, cluster_n, 1, false, swapped>, fused>(),
    TCGEMM_WGMMA_RAGGED_CONFIGS(EMULATED_ENTRY)
#undef EMULATED_ENTRY
};

}  // namespace
}  // namespace tcgemm::wgmma_family
