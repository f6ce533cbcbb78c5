// Stands in for csrc/ptx/mbarrier.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_offset(pointer); }

inline uint32_t shared_base_address(const void* memory) { return shared_address(memory); }

inline void mbarrier_init(uint32_t barrier, uint32_t arrive_count) { emulator::mbarrier_init(barrier, arrive_count); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { emulator::mbarrier_arrive(barrier, bytes); }
inline uint32_t mapa(uint32_t address, uint32_t cta_rank) { return emulator::map_to_block(address, cta_rank); }
// Orders none of the thread's writes to other blocks.
inline void mbarrier_arrive_remote(uint32_t barrier, uint32_t cta_rank) {
  emulator::write_remotely([address = mapa(barrier, cta_rank)] { emulator::mbarrier_arrive(address, 0); });
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emulator::mbarrier_wait(barrier, parity); }
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) { mbarrier_wait(barrier, parity); }
inline void named_barrier_sync(uint32_t id, uint32_t num_threads) { emulator::sync_named(id, num_threads); }
inline void named_barrier_arrive(uint32_t id, uint32_t num_threads) { emulator::arrive_named(id, num_threads); }

}  // namespace tcgemm::ptx
