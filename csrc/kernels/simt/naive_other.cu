#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

template <typename In, typename Acc>
Status launch(const Problem& p, const Buffers& buffers, void* stream) {
  return launch_naive<In, Acc, Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>>(p, buffers, stream);
}

}  // namespace

Status launch_naive_other(const Problem& p, const Buffers& buffers, void* stream) {
  switch (p.a.dtype) {
    case DType::kF64: return launch<double, double>(p, buffers, stream);
    case DType::kS8: return launch<int8_t, int32_t>(p, buffers, stream);
    case DType::kU8: return launch<uint8_t, int32_t>(p, buffers, stream);
    case DType::kC64: return launch<Complex<float>, Complex<float>>(p, buffers, stream);
    case DType::kC128: return launch<Complex<double>, Complex<double>>(p, buffers, stream);
    default: return Status::internal("no instantiation for this dtype");
  }
}

}  // namespace tcgemm::simt
