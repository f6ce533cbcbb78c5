#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Tile, typename In, typename Acc>
Status launch(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  return launch_tiled_layouts<M16N16K16, Tile, In, Acc, AnyFloat>(p, buffers, stream);
}

template <typename In>
Status launch_f32(const Problem& p, const Buffers& buffers, std::string_view tile, cudaStream_t stream) {
  if (tile == "64x64x32") return launch<Tile64x64x32, In, float>(p, buffers, stream);
  return launch<Tile128x128x32, In, float>(p, buffers, stream);
}

}  // namespace

// The square shape, with an instantiation for each layout.
Status launch_tiled_16bit(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream) {
  if (p.compute == Compute::kF16) return launch<Tile128x128x32, __half, __half>(p, buffers, stream);
  if (p.a.dtype == DType::kBF16) return launch_f32<__nv_bfloat16>(p, buffers, config.tile, stream);
  return launch_f32<__half>(p, buffers, config.tile, stream);
}

}  // namespace tcgemm::wmma
