#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

Status launch_tiled_f64(const Problem& p, const Buffers& buffers, void* stream) {
  return launch_tiled_layouts<M8N8K4, Tile64x128x16, double, double, Exact<double>>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
