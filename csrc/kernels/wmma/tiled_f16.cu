#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

Status launch_tiled_f16(const Problem& p, const Buffers& buffers, void* stream) {
  using Tile = Tile128x128x32;
  if (is_bare(p)) {
    return launch_tiled_layouts<M16N16K16, Tile, __half, float, BareFloat>(p, buffers, stream);
  }
  return launch_tiled_layouts<M16N16K16, Tile, __half, float, AnyFloat>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
