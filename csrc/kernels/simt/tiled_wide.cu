#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

using C64 = Complex<float>;
using C128 = Complex<double>;
using Identity = Output<double, epilogue::Identity<double, double>>;
template <typename T>
using AlphaBetaC = Output<T, epilogue::AlphaBetaC<T, T>>;

}  // namespace

// 8- and 16-byte elements.
Status launch_tiled_wide(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  if (p.a.dtype == DType::kC128) return launch_tiled<Tile64x64x8Wide, C128, AlphaBetaC<C128>>(p, buffers, stream);
  if (p.a.dtype == DType::kC64) return launch_tiled<Tile64x64x8, C64, AlphaBetaC<C64>>(p, buffers, stream);
  if (is_identity(p)) return launch_tiled<Tile64x64x8, double, Identity>(p, buffers, stream);
  return launch_tiled<Tile64x64x8, double, AlphaBetaC<double>>(p, buffers, stream);
}

}  // namespace tcgemm::simt
