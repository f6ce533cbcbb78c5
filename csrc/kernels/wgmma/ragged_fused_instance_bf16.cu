#include "kernels/wgmma/ragged_launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<RaggedLaunchFunction>& ragged_fused_bf16_table() {
  static const std::vector<RaggedLaunchFunction> table = ragged_fused_launch_table<__nv_bfloat16>();
  return table;
}

}  // namespace tcgemm::wgmma_family
