#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_ragged_configs<F16, tile::Operands<KMajor<__half>, KMajor<__half>>>();

}  // namespace tcgemm::wgmma_family
