// Stands in for csrc/ptx/cluster.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline uint32_t cluster_ctarank() { return emulator::current().block->rank; }
inline bool elect_one() {
  __syncwarp();  // of a whole warp
  return emulator::current().lane == 0;
}
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void st_async_v4(uint32_t address, float x, float y, float z, float w, uint32_t barrier) {
  emulator::store_async(address, {x, y, z, w}, barrier);
}
template <uint32_t kRegisters, int kBlocks = 1>
void setmaxnreg_inc() {
  emulator::set_registers(kRegisters, true, kBlocks);
}
template <uint32_t kRegisters, int kBlocks = 1>
void setmaxnreg_dec() {
  emulator::set_registers(kRegisters, false, kBlocks);
}
inline void griddepcontrol_wait() { emulator::current().waited_for_previous = true; }
inline void griddepcontrol_launch_dependents() {}

}  // namespace tcgemm::ptx
