#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_configs<TF32, tile::Operands<Transposed<float>, KMajor<float>>>();

}  // namespace tcgemm::wgmma_family
