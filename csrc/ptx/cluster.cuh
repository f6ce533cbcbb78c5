// Thread block cluster, election, register allocation and dependent-launch instructions.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// Rank of this block in its cluster. PTX 7.8, sm_90
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in one thread of a warp that is converged. The compiler then knows that what this thread issues comes from
// one thread: a bulk copy in a branch by threadIdx.x is wrapped in a loop over the threads that might be there, and
// what its uniform registers hold is moved there each time. PTX 8.0, sm_90
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Orders no memory accesses. PTX 8.0, sm_90
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// PTX 7.8, sm_90
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 16-byte store into the shared memory of another block, which `barrier` there counts; both addresses come
// from mapa. PTX 8.1, sm_90
__device__ __forceinline__ void st_async_v4(uint32_t address, float x, float y, float z, float w, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}

// Take effect in a whole warpgroup, under a register cap known at entry: kBlocks, by the kernel's launch bounds, share
// an SM's. PTX 8.0, sm_90a
template <uint32_t kRegisters, int kBlocks = 1>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters, int kBlocks = 1>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for the kernels this launch depends on; returns at once in an ordinary launch. PTX 7.8, sm_90
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets a dependent launch begin. PTX 7.8, sm_90
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tcgemm::ptx
