#include "kernels/wgmma/launch.cuh"

namespace tcgemm::wgmma_family {

const std::vector<LaunchFunction>& bf16_table_00() {
  static const std::vector<LaunchFunction> table = launch_table<__nv_bfloat16, 0, 0>();
  return table;
}

}  // namespace tcgemm::wgmma_family
