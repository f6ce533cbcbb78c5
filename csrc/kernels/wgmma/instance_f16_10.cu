#include "kernels/wgmma/launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<LaunchFunction>& f16_table_10() {
  static const std::vector<LaunchFunction> table = launch_table<__half, 1, 0>();
  return table;
}

}  // namespace tcgemm::wgmma_family
