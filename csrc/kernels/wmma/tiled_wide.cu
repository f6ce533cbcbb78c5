#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

// TF32 and float64.
Tiled tiled_wide(const Problem& p) {
  if (p.a.dtype == DType::kF64) {
    return make_tiled_layouts<M8N8K4, Tile64x128x16, double, double, Exact<double>>(p);
  }
  return make_tiled_layouts<M16N16K8, Tile128x128x16, float, float, AnyFloat>(p);
}

}  // namespace tcgemm::wmma
