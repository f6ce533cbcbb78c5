#include "kernels/mma_sync/prebuilt.cuh"

namespace tcgemm::mma {

static const bool added = add_prebuilt<float, ptx::TF32>();

}  // namespace tcgemm::mma
