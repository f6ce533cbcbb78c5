#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

// float16 accumulators.
Status launch_tiled_f16_f16(const Problem& p, const Buffers& buffers, void* stream) {
  return launch_tiled_layouts<M16N16K16, Tile128x128x32, __half, __half, AnyFloat>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
