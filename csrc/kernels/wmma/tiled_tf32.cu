#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

Status launch_tiled_tf32(const Problem& p, const Buffers& buffers, void* stream) {
  return launch_tiled_layouts<M16N16K8, Tile128x128x16, float, float, AnyFloat>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
