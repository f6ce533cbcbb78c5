// Plain accesses to global memory that must be one instruction.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

__device__ __forceinline__ void st_global_v4_u32(void* address, const uint32_t (&r)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void st_global_v2_u32(void* address, const uint32_t (&r)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(r[0]), "r"(r[1]) : "memory");
}

// Loads that are not moved past a barrier of the warp's threads, as those through the read-only path may be.

template <typename Word>
__device__ __forceinline__ Word ld_global(const void* address) {
  if constexpr (sizeof(Word) == 8) {
    uint64_t x;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(address));
    return x;
  } else {
    uint32_t x;
    if constexpr (sizeof(Word) == 4) asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(address));
    if constexpr (sizeof(Word) == 2) asm volatile("ld.global.u16 %0, [%1];" : "=r"(x) : "l"(address));
    if constexpr (sizeof(Word) == 1) asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(address));
    return static_cast<Word>(x);
  }
}

__device__ __forceinline__ void ld_global_v4_u32(uint32_t* r, const void* address) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(address));
}

// Accesses that other devices take part in. PTX 6.0, sm_70
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model

__device__ __forceinline__ void st_relaxed_sys_v4_u32(void* address, const uint32_t (&r)[4]) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void st_relaxed_sys_u32(uint32_t* address, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void ld_relaxed_sys_v4_u32(uint32_t (&r)[4], const void* address) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(address)
               : "memory");
}

__device__ __forceinline__ uint64_t ld_relaxed_sys_u64(const uint64_t* address) {
  uint64_t x;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(address) : "memory");
  return x;
}

__device__ __forceinline__ void st_release_sys_u64(uint64_t* address, uint64_t x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}

__device__ __forceinline__ uint64_t ld_acquire_sys_u64(const uint64_t* address) {
  uint64_t x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(address) : "memory");
  return x;
}

// Asks for the line of an address to be brought to L2. PTX 2.0
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace tcgemm::ptx
