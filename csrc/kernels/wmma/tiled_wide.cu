#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

// TF32 and float64.
Status launch_tiled_wide(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  if (p.a.dtype == DType::kF64) {
    return launch_tiled_layouts<M8N8K4, Tile64x128x16, double, double, Exact<double>>(p, buffers, stream);
  }
  return launch_tiled_layouts<M16N16K8, Tile128x128x16, float, float, AnyFloat>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
