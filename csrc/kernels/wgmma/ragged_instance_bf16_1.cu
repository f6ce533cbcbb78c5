#include "kernels/wgmma/instances.cuh"

namespace tcgemm::wgmma_family {

static const bool rows_added =
    add_ragged_configs<BF16, tile::Operands<MNMajor<__nv_bfloat16>, KMajor<__nv_bfloat16>>>();
static const bool contractions_added =
    add_ragged_configs<BF16, tile::Operands<MNMajor<__nv_bfloat16>, MNMajor<__nv_bfloat16>>>();

}  // namespace tcgemm::wgmma_family
