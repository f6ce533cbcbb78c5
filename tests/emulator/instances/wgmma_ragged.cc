// The wgmma kernels of grouped products for EMULATED_MMA and EMULATED_OPERANDS.
#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_ragged_configs<EMULATED_MMA, EMULATED_OPERANDS>();

}  // namespace tcgemm::wgmma_family
