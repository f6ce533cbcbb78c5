#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_configs<BF16, tile::Operands<KMajor<__nv_bfloat16>, MNMajor<__nv_bfloat16>>>();

}  // namespace tcgemm::wgmma_family
