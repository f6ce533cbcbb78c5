#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {

Status launch_tiled_f32_128x128(const Problem& p, const Buffers& buffers, void* stream) {
  using Tile = Tile128x128x16;
  if (is_identity(p)) return launch_tiled<Tile, float, FloatOutputs<epilogue::Identity, float>>(p, buffers, stream);
  return launch_tiled<Tile, float, FloatOutputs<epilogue::AlphaBetaC, float>>(p, buffers, stream);
}

}  // namespace tcgemm::simt
