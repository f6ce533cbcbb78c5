// mbarrier and named-barrier instructions (PTX ISA: parallel synchronization and communication). Barriers are addresses
// in shared memory.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// That of a kernel's shared memory, to which it adds all others. The compiler does not see where it comes from: else it
// converts the pointer anew at each use, which has 32 bits with nvcc and 64 with NVRTC, and makes other code of it.
__device__ __forceinline__ uint32_t shared_base_address(const void* memory) {
  uint32_t address = shared_address(memory);
  asm("" : "+r"(address));
  return address;
}

// PTX 7.0, sm_80
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrive_count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrive_count));
}

// Makes mbarrier_init visible to the copy engine and to the other blocks of the cluster. PTX 8.0, sm_90
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX 7.0, sm_80
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also announces `bytes` to come through the copy engine. PTX 8.0, sm_90
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The address, in the cluster's shared window, of `address` in block `cta_rank`. PTX 7.8, sm_90
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t cta_rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta_rank));
  return mapped;
}

// Arrival at a barrier of another block of the cluster. PTX 7.8, sm_90
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t cta_rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, cta_rank)) : "memory");
}

// Waits until the phase of parity `parity` has completed. PTX 7.8, sm_90
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same, seeing also what other blocks of the cluster released. PTX 8.0, sm_90
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barrier `id` (1..15; 0 is __syncthreads) among `num_threads` threads. PTX 6.0, sm_70
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Arrival at such a barrier without waiting for it; counts among its threads. PTX 6.0, sm_70
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace tcgemm::ptx
