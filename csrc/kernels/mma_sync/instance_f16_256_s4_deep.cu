#include "kernels/mma_sync/launch.cuh"

namespace tcgemm::mma {

template Status launch<Tile256Stages4Deep, F16F32>(const Problem&, const Buffers&, int, cudaStream_t);

}  // namespace tcgemm::mma
