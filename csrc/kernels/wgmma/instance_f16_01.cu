#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_configs<__half, 0, 1>("__half");

}  // namespace tcgemm::wgmma_family
