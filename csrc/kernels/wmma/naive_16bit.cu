#include "kernels/wmma/launch.cuh"

namespace tcgemm::wmma {
namespace {

template <typename Mma>
Status launch(const Problem& p, const Buffers& buffers, bool saturates, void* stream) {
  if (p.a.dtype == DType::kBF16) {
    return launch_naive<NaiveConfig<Mma>, __nv_bfloat16, float, AnyFloat>(p, buffers, stream);
  }
  if (p.compute == Compute::kF32) return launch_naive<NaiveConfig<Mma>, __half, float, AnyFloat>(p, buffers, stream);
  if (saturates) return launch_naive<NaiveConfig<Mma, true>, __half, __half, AnyFloat>(p, buffers, stream);
  return launch_naive<NaiveConfig<Mma>, __half, __half, AnyFloat>(p, buffers, stream);
}

}  // namespace

Status launch_naive_16bit(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream) {
  if (config.shape == "m16n16k16") return launch<M16N16K16>(p, buffers, config.saturates, stream);
  if (config.shape == "m32n8k16") return launch<M32N8K16>(p, buffers, config.saturates, stream);
  return launch<M8N32K16>(p, buffers, config.saturates, stream);
}

}  // namespace tcgemm::wmma
