#include "kernels/wgmma/prebuilt.cuh"

namespace tcgemm::wgmma_family {

static const bool added = add_prebuilt_16bit<__nv_bfloat16>();

}  // namespace tcgemm::wgmma_family
