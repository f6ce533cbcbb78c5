#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, bool kSaturate = false>
using Config = TiledConfig<Mma, Tile128x128x32, AnyLayout, kSaturate>;

template <typename Mma>
Status launch_saturating(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  return launch_tiled<Config<Mma, true>, __half, __half, AnyFloat>(p, buffers, stream);
}

template <typename Mma>
Status launch_oblong(const Problem& p, const Buffers& buffers, bool saturates, cudaStream_t stream) {
  if (saturates) return launch_saturating<Mma>(p, buffers, stream);
  if (p.a.dtype == DType::kBF16) return launch_tiled<Config<Mma>, __nv_bfloat16, float, AnyFloat>(p, buffers, stream);
  if (p.compute == Compute::kF32) return launch_tiled<Config<Mma>, __half, float, AnyFloat>(p, buffers, stream);
  return launch_tiled<Config<Mma>, __half, __half, AnyFloat>(p, buffers, stream);
}

}  // namespace

// 16-bit elements: the oblong shapes, and float16 accumulators that stay finite.
Status launch_tiled_any_layout(const Problem& p, const Buffers& buffers, const ConfigName& config,
                               cudaStream_t stream) {
  if (config.shape == "m16n16k16") return launch_saturating<M16N16K16>(p, buffers, stream);
  if (config.shape == "m32n8k16") return launch_oblong<M32N8K16>(p, buffers, config.saturates, stream);
  return launch_oblong<M8N32K16>(p, buffers, config.saturates, stream);
}

}  // namespace tcgemm::wmma
