#include "kernels/wgmma/ragged_launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<RaggedLaunchFunction>& ragged_f16_table_0() {
  static const std::vector<RaggedLaunchFunction> table = ragged_launch_table<__half, 0>();
  return table;
}

}  // namespace tcgemm::wgmma_family
