#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, typename In, typename Acc, typename Outputs>
Status launch_saturating(const Problem& p, const Buffers& buffers, bool saturates, cudaStream_t stream) {
  if (saturates) return launch_naive<NaiveConfig<Mma, true>, In, Acc, Outputs>(p, buffers, stream);
  return launch_naive<NaiveConfig<Mma>, In, Acc, Outputs>(p, buffers, stream);
}

template <typename Mma>
Status launch(const Problem& p, const Buffers& buffers, bool saturates, cudaStream_t stream) {
  using Config = NaiveConfig<Mma>;
  switch (p.a.dtype) {
    case DType::kS8: return launch_saturating<Mma, int8_t, int32_t, Exact<int32_t>>(p, buffers, saturates, stream);
    case DType::kU8: return launch_saturating<Mma, uint8_t, int32_t, Exact<int32_t>>(p, buffers, saturates, stream);
    case DType::kBF16: return launch_naive<Config, __nv_bfloat16, float, AnyFloat>(p, buffers, stream);
    default:
      if (p.compute == Compute::kF32) return launch_naive<Config, __half, float, AnyFloat>(p, buffers, stream);
      return launch_saturating<Mma, __half, __half, AnyFloat>(p, buffers, saturates, stream);
  }
}

}  // namespace

Status launch_naive(const Problem& p, const Buffers& buffers, const ConfigName& config, cudaStream_t stream) {
  if (config.shape == "m16n16k16") return launch<M16N16K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m32n8k16") return launch<M32N8K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m8n32k16") return launch<M8N32K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m16n16k8") {
    return launch_naive<NaiveConfig<M16N16K8>, float, float, AnyFloat>(p, buffers, stream);
  }
  return launch_naive<NaiveConfig<M8N8K4>, double, double, Exact<double>>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
