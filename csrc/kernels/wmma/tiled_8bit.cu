#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, typename In, bool kSaturate>
Status launch(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  using Config = TiledConfig<Mma, Tile128x128x64, AnyLayout, kSaturate>;
  return launch_tiled<Config, In, int32_t, Exact<int32_t>>(p, buffers, stream);
}

template <typename Mma>
Status launch_shape(const Problem& p, const Buffers& buffers, bool saturates, cudaStream_t stream) {
  if (p.a.dtype == DType::kS8) {
    return saturates ? launch<Mma, int8_t, true>(p, buffers, stream) : launch<Mma, int8_t, false>(p, buffers, stream);
  }
  return saturates ? launch<Mma, uint8_t, true>(p, buffers, stream) : launch<Mma, uint8_t, false>(p, buffers, stream);
}

}  // namespace

// ldmatrix cannot transpose 8-bit elements, so K is contiguous in shared memory in any layout.
Status launch_tiled_8bit(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream) {
  if (config.shape == "m16n16k16") return launch_shape<M16N16K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m32n8k16") return launch_shape<M32N8K16>(p, buffers, config.saturates, stream);
  return launch_shape<M8N32K16>(p, buffers, config.saturates, stream);
}

}  // namespace tcgemm::wmma
