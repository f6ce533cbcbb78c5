#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

template <typename In>
Status launch_float(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  if (is_identity(p)) return launch_naive<In, float, FloatOutputs<epilogue::Identity, float>>(p, buffers, stream);
  return launch_naive<In, float, FloatOutputs<epilogue::AlphaBetaC, float>>(p, buffers, stream);
}

template <typename In, typename Acc>
Status launch_exact(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  return launch_naive<In, Acc, Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>>(p, buffers, stream);
}

}  // namespace

Status launch_naive(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  switch (p.a.dtype) {
    case DType::kF16: return launch_float<__half>(p, buffers, stream);
    case DType::kBF16: return launch_float<__nv_bfloat16>(p, buffers, stream);
    case DType::kF32: return launch_float<float>(p, buffers, stream);
    case DType::kF64: return launch_exact<double, double>(p, buffers, stream);
    case DType::kS8: return launch_exact<int8_t, int32_t>(p, buffers, stream);
    case DType::kU8: return launch_exact<uint8_t, int32_t>(p, buffers, stream);
    case DType::kC64: return launch_exact<Complex<float>, Complex<float>>(p, buffers, stream);
    case DType::kC128: return launch_exact<Complex<double>, Complex<double>>(p, buffers, stream);
    default: return Status::internal("no instantiation for this dtype");
  }
}

}  // namespace tcgemm::simt
