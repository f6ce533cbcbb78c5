// One tile of mma_sync for one type: EMULATED_TILE, EMULATED_INSTRUCTION.
#include "kernels/mma_sync/launch.cuh"

namespace tcgemm::mma {

template Status launch<EMULATED_TILE, EMULATED_INSTRUCTION>(const Problem&, const Buffers&, const Device&, int,
                                                            cudaStream_t);

}  // namespace tcgemm::mma
