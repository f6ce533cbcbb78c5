#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool rows_added = add_ragged_configs<F16, tile::Operands<MNMajor<__half>, KMajor<__half>>>();
static const bool contractions_added = add_ragged_configs<F16, tile::Operands<MNMajor<__half>, MNMajor<__half>>>();

}  // namespace tcgemm::wgmma_family
