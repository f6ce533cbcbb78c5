#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma>
Status launch(const Problem& p, const Buffers& buffers, void* stream) {
  using Config = TiledConfig<Mma, Tile128x128x32, AnyLayout, true>;
  return launch_tiled<Config, __half, __half, AnyFloat>(p, buffers, stream);
}

}  // namespace

// float16 accumulators that stay finite.
Status launch_tiled_satf(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream) {
  if (config.shape == "m16n16k16") return launch<M16N16K16>(p, buffers, stream);
  if (config.shape == "m32n8k16") return launch<M32N8K16>(p, buffers, stream);
  return launch<M8N32K16>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
