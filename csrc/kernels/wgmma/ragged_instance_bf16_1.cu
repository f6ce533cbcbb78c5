#include "kernels/wgmma/ragged_launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<RaggedLaunchFunction>& ragged_bf16_table_1() {
  static const std::vector<RaggedLaunchFunction> table = ragged_launch_table<__nv_bfloat16, 1>();
  return table;
}

}  // namespace tcgemm::wgmma_family
