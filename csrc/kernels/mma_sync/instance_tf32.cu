#include "kernels/mma_sync/launch.cuh"

namespace tcgemm::mma {

template Status launch<Tile256Stages3, TF32F32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);
template Status launch<Tile128Stages4, TF32F32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);
template Status launch<Tile64Stages4, TF32F32>(const Problem&, const Buffers&, const Device&, int, cudaStream_t);

}  // namespace tcgemm::mma
