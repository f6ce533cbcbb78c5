#include "kernels/wgmma/launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<LaunchFunction>& f16_table_11() {
  static const std::vector<LaunchFunction> table = launch_table<__half, 1, 1>();
  return table;
}

}  // namespace tcgemm::wgmma_family
