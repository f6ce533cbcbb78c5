#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

template <typename T>
using Outputs = Output<T, epilogue::AlphaBetaC<T, T>>;

}  // namespace

Status launch_tiled_complex(const Problem& p, const Buffers& buffers, void* stream) {
  using C64 = Complex<float>;
  using C128 = Complex<double>;
  if (p.a.dtype == DType::kC64) return launch_tiled<Tile64x64x8, C64, Outputs<C64>>(p, buffers, stream);
  return launch_tiled<Tile64x64x8Wide, C128, Outputs<C128>>(p, buffers, stream);
}

}  // namespace tcgemm::simt
