#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {

Status launch_tiled_small(const Problem& p, const Buffers& buffers, void* stream) {
  if (p.a.dtype == DType::kBF16) {
    return launch_tiled_layouts<M16N16K16, Tile64x64x32, __nv_bfloat16, float, AnyFloat>(p, buffers, stream);
  }
  return launch_tiled_layouts<M16N16K16, Tile64x64x32, __half, float, AnyFloat>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
