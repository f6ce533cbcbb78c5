// Bulk tensor copies (TMA), PTX ISA "cp.async.bulk.tensor", rank 4 throughout: columns, rows and
// two batch levels. PTX 8.0, sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace tcgemm::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at coordinates (c0, c1, c2, c3), completing on `barrier` in bytes.
__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same into every block whose bit is set in `cta_mask`, at the same offset of its shared
// memory and completing on its own barrier at the same offset.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map, uint32_t barrier,
                                                      uint16_t cta_mask, int32_t c0, int32_t c1, int32_t c2,
                                                      int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Box from shared memory to coordinates (c0, c1, c2); elements outside the tensor are dropped.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, uint32_t source, int32_t c0, int32_t c1,
                                             int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t source, int32_t c0, int32_t c1,
                                             int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `kPending` of this thread's committed stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before the copy engine's.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tcgemm::ptx
