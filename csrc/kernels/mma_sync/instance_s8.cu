#include "kernels/mma_sync/launch.cuh"

namespace tcgemm::mma {

template Status launch<Tile256Stages3, S8S32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);
template Status launch<Tile128Stages4, S8S32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);
template Status launch<Tile64Stages4, S8S32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);

}  // namespace tcgemm::mma
