#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Tile, typename In, typename Acc>
Tiled make(const Problem& p) {
  return make_tiled_layouts<M16N16K16, Tile, In, Acc, AnyFloat>(p);
}

template <typename In>
Tiled make_f32(const Problem& p, std::string_view tile) {
  return tile == "64x64x32" ? make<Tile64x64x32, In, float>(p) : make<Tile128x128x32, In, float>(p);
}

}  // namespace

// The square shape, with an instantiation for each layout.
Tiled tiled_16bit(const Problem& p, const ConfigName& config) {
  if (p.compute == Compute::kF16) return make<Tile128x128x32, __half, __half>(p);
  return p.a.dtype == DType::kBF16 ? make_f32<__nv_bfloat16>(p, config.tile) : make_f32<__half>(p, config.tile);
}

}  // namespace tcgemm::wmma
