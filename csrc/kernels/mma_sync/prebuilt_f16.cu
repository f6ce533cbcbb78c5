#include "kernels/mma_sync/prebuilt.cuh"

namespace tcgemm::mma {

static const bool added = add_prebuilt<__half>();

}  // namespace tcgemm::mma
