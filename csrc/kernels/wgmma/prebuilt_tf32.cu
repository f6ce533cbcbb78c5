#include "kernels/wgmma/prebuilt.cuh"

namespace tcgemm::wgmma_family {

using TF32 = tile::Mma<ptx::TF32, ptx::TF32, float>;

static const bool added =
    add_prebuilt<TF32, KMajor<float>, KMajor<float>>() & add_prebuilt<TF32, Transposed<float>, KMajor<float>>();

}  // namespace tcgemm::wgmma_family
