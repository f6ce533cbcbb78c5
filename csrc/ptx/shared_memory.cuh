// Plain accesses to shared memory by 32-bit address. PTX 1.0.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}

__device__ __forceinline__ void ld_shared_v2_u32(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address) : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4_u32(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// By the type of what is loaded.
__device__ __forceinline__ void ld_shared(uint16_t& r, uint32_t address) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address) : "memory");
}
__device__ __forceinline__ void ld_shared(float& r, uint32_t address) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void st_shared_v2_f32(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v2_u32(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1]) : "memory");
}

__device__ __forceinline__ void st_shared_v4_u32(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// 16 zero bytes, by threads for which `valid` holds; no thread branches.
__device__ __forceinline__ void st_shared_zeros_16(uint32_t address, bool valid) {
  asm volatile(
      "{\n"
      "  .reg .pred stores;\n"
      "  setp.ne.u32 stores, %1, 0;\n"
      "  @stores st.shared.v4.u32 [%0], {%2, %2, %2, %2};\n"
      "}" ::"r"(address),
      "r"(static_cast<uint32_t>(valid)), "r"(0)
      : "memory");
}

}  // namespace tcgemm::ptx
