#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, typename In, typename Acc, bool kSaturate = false>
Tiled make() {
  return make_tiled<TiledConfig<Mma, Tile128x128x32, AnyLayout, kSaturate>, In, Acc, AnyFloat>();
}

template <typename Mma>
Tiled make_oblong(const Problem& p, bool saturates) {
  if (saturates) return make<Mma, __half, __half, true>();
  if (p.a.dtype == DType::kBF16) return make<Mma, __nv_bfloat16, float>();
  return p.compute == Compute::kF32 ? make<Mma, __half, float>() : make<Mma, __half, __half>();
}

}  // namespace

// 16-bit elements: the oblong shapes, and float16 accumulators that stay finite.
Tiled tiled_any_layout(const Problem& p, const ConfigName& config) {
  if (config.shape == "m16n16k16") return make<M16N16K16, __half, __half, true>();
  if (config.shape == "m32n8k16") return make_oblong<M32N8K16>(p, config.saturates);
  return make_oblong<M8N32K16>(p, config.saturates);
}

}  // namespace tcgemm::wmma
