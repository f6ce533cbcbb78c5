#include "kernels/simt/launch.cuh"

namespace tcgemm::simt {
namespace {

template <typename In>
Status launch(const Problem& p, const Buffers& buffers, void* stream) {
  if (is_identity(p)) return launch_naive<In, float, FloatOutputs<epilogue::Identity, float>>(p, buffers, stream);
  return launch_naive<In, float, FloatOutputs<epilogue::AlphaBetaC, float>>(p, buffers, stream);
}

}  // namespace

Status launch_naive_float(const Problem& p, const Buffers& buffers, void* stream) {
  if (p.a.dtype == DType::kF16) return launch<__half>(p, buffers, stream);
  if (p.a.dtype == DType::kBF16) return launch<__nv_bfloat16>(p, buffers, stream);
  return launch<float>(p, buffers, stream);
}

}  // namespace tcgemm::simt
