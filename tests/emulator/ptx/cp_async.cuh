// Stands in for csrc/ptx/cp_async.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline void cp_async_16(uint32_t destination, const void* source, uint32_t valid) {
  emulator::cp_async(destination, source, 16, valid != 0 ? 16 : 0);
}
inline void cp_async_zfill_16(uint32_t destination, const void* source, uint32_t valid_bytes) {
  emulator::cp_async(destination, source, 16, valid_bytes);
}
template <int kBytes>
void cp_async_narrow(uint32_t destination, const void* source, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  emulator::cp_async(destination, source, kBytes, valid ? kBytes : 0);
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) { emulator::cp_async_arrive(barrier); }
inline void cp_async_commit_group() { emulator::current().copies.commit(); }
template <int kPending>
void cp_async_wait_group() {
  emulator::current().copies.wait(kPending);
}

}  // namespace tcgemm::ptx
