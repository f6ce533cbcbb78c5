// Stands in for csrc/ptx/tma.cuh.
#pragma once

#include "ptx/mbarrier.cuh"
#include "tensor_map.h"

namespace tcgemm::ptx {

inline void prefetch_tensormap(const CUtensorMap* map) { emulator::check_address(map); }
inline void tma_load_4d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int32_t c0, int32_t c1,
                        int32_t c2, int32_t c3) {
  emulator::tma_load(destination, map, barrier, 1u << emulator::current().block->rank, {c0, c1, c2, c3});
}
inline void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map, uint32_t barrier, uint16_t cta_mask,
                                  int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  emulator::tma_load(destination, map, barrier, cta_mask, {c0, c1, c2, c3});
}
inline void tma_store_3d(const CUtensorMap* map, uint32_t source, int32_t c0, int32_t c1, int32_t c2) {
  emulator::tma_store(map, source, {c0, c1, c2});
}
inline void tma_store_4d(const CUtensorMap* map, uint32_t source, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  emulator::tma_store(map, source, {c0, c1, c2, c3});
}
inline void tma_store_commit() { emulator::current().bulk_stores.commit(); }
template <int kPending>
void tma_store_wait_read() {
  emulator::current().bulk_stores.wait(kPending);
}
inline void fence_proxy_async() { emulator::fence_proxy_async(); }

}  // namespace tcgemm::ptx
