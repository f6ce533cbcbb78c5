#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_configs<float, 1, 0>("float");

}  // namespace tcgemm::wgmma_family
