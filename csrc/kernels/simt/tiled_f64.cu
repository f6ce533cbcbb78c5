#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {

Status launch_tiled_f64(const Problem& p, const Buffers& buffers, void* stream) {
  using Identity = Output<double, epilogue::Identity<double, double>>;
  using AlphaBetaC = Output<double, epilogue::AlphaBetaC<double, double>>;
  if (is_identity(p)) return launch_tiled<Tile64x64x8, double, Identity>(p, buffers, stream);
  return launch_tiled<Tile64x64x8, double, AlphaBetaC>(p, buffers, stream);
}

}  // namespace tcgemm::simt
