#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma>
Status launch(const Problem& p, const Buffers& buffers, void* stream) {
  using Config = TiledConfig<Mma, Tile128x128x32, AnyLayout>;
  if (p.a.dtype == DType::kBF16) return launch_tiled<Config, __nv_bfloat16, float, AnyFloat>(p, buffers, stream);
  if (p.compute == Compute::kF32) return launch_tiled<Config, __half, float, AnyFloat>(p, buffers, stream);
  return launch_tiled<Config, __half, __half, AnyFloat>(p, buffers, stream);
}

}  // namespace

// The oblong 16-bit shapes.
Status launch_tiled_shapes(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream) {
  return config.shape == "m32n8k16" ? launch<M32N8K16>(p, buffers, stream) : launch<M8N32K16>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
