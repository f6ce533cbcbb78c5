#include "kernels/wgmma/ragged_launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<RaggedLaunchFunction>& ragged_bf16_table_0() {
  static const std::vector<RaggedLaunchFunction> table = ragged_launch_table<__nv_bfloat16, 0>();
  return table;
}

}  // namespace tcgemm::wgmma_family
