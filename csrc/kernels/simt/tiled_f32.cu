#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

template <typename Tile>
Status launch(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  if (is_identity(p)) return launch_tiled<Tile, float, FloatOutputs<epilogue::Identity, float>>(p, buffers, stream);
  return launch_tiled<Tile, float, FloatOutputs<epilogue::AlphaBetaC, float>>(p, buffers, stream);
}

}  // namespace

Status launch_tiled_f32(const Problem& p, const Buffers& buffers, std::string_view config, cudaStream_t stream) {
  if (config == "128x64x16") return launch<Tile128x64x16>(p, buffers, stream);
  return launch<Tile128x128x16>(p, buffers, stream);
}

}  // namespace tcgemm::simt
