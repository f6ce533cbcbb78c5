#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_ragged_configs<__half, 1>("__half");

}  // namespace tcgemm::wgmma_family
