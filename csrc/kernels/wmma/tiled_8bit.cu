#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, typename In, bool kSaturate>
Tiled make() {
  return make_tiled<TiledConfig<Mma, Tile128x128x64, AnyLayout, kSaturate>, In, int32_t, Exact<int32_t>>();
}

template <typename Mma>
Tiled make_shape(const Problem& p, bool saturates) {
  if (p.a.dtype == DType::kS8) return saturates ? make<Mma, int8_t, true>() : make<Mma, int8_t, false>();
  return saturates ? make<Mma, uint8_t, true>() : make<Mma, uint8_t, false>();
}

}  // namespace

// ldmatrix cannot transpose 8-bit elements, so K is contiguous in shared memory in any layout.
Tiled tiled_8bit(const Problem& p, const ConfigName& config) {
  if (config.shape == "m16n16k16") return make_shape<M16N16K16>(p, config.saturates);
  if (config.shape == "m32n8k16") return make_shape<M32N8K16>(p, config.saturates);
  return make_shape<M8N32K16>(p, config.saturates);
}

}  // namespace tcgemm::wmma
