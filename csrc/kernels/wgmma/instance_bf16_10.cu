#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_configs<__nv_bfloat16, 1, 0>("__nv_bfloat16");

}  // namespace tcgemm::wgmma_family
