// cp.async: copies from global to shared memory that bypass registers (PTX ISA: data movement,
// non-bulk asynchronous copy). PTX 7.5, sm_80.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// Copies 16 aligned bytes if `valid` is not 0; else writes zeros and reads nothing. Through L2 only.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, uint32_t valid) {
  asm volatile(
      "{\n"
      "  .reg .pred ignored;\n"
      "  setp.eq.u32 ignored, %2, 0;\n"
      "  cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n"
      "}" ::"r"(destination),
      "l"(source), "r"(valid)
      : "memory");
}

// Copies the first `valid_bytes` of 16 aligned bytes and writes zeros for the others. Through L2 only.
__device__ __forceinline__ void cp_async_zfill_16(uint32_t destination, const void* source, uint32_t valid_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

// As cp_async_16, of 4 or 8 bytes, aligned so; these go through L1.
template <int kBytes>
__device__ __forceinline__ void cp_async_narrow(uint32_t destination, const void* source, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  asm volatile(
      "{\n"
      "  .reg .pred ignored;\n"
      "  setp.eq.u32 ignored, %3, 0;\n"
      "  cp.async.ca.shared.global [%0], [%1], %2, ignored;\n"
      "}" ::"r"(destination),
      "l"(source), "n"(kBytes), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// Closes the group of all copies this thread has issued since the last one.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `kPending` newest groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// An arrival at a barrier of this block that happens when all copies that this thread has issued are
// complete; the barrier expects it. PTX 7.0, sm_80
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace tcgemm::ptx
