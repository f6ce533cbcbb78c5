#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma, typename In>
Status launch_8bit(const Problem& p, const Buffers& buffers, bool saturates, void* stream) {
  if (saturates) return launch_naive<NaiveConfig<Mma, true>, In, int32_t, Exact<int32_t>>(p, buffers, stream);
  return launch_naive<NaiveConfig<Mma>, In, int32_t, Exact<int32_t>>(p, buffers, stream);
}

template <typename Mma>
Status launch(const Problem& p, const Buffers& buffers, bool saturates, void* stream) {
  if (p.a.dtype == DType::kS8) return launch_8bit<Mma, int8_t>(p, buffers, saturates, stream);
  return launch_8bit<Mma, uint8_t>(p, buffers, saturates, stream);
}

}  // namespace

Status launch_naive_other(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream) {
  if (config.shape == "m16n16k16") return launch<M16N16K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m32n8k16") return launch<M32N8K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m8n32k16") return launch<M8N32K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m16n16k8")
    return launch_naive<NaiveConfig<M16N16K8>, float, float, AnyFloat>(p, buffers, stream);
  return launch_naive<NaiveConfig<M8N8K4>, double, double, Exact<double>>(p, buffers, stream);
}

}  // namespace tcgemm::wmma
