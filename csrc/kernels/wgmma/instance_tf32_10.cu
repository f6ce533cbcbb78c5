#include "kernels/wgmma/launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<LaunchFunction>& tf32_table_10() {
  static const std::vector<LaunchFunction> table = launch_table<float, 1, 0>();
  return table;
}

}  // namespace tcgemm::wgmma_family
