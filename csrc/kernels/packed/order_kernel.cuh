// X as wide_kernel.cuh wants it: k in the order of a packed weight (problem/operands/packed_weight.py), by which two
// neighbors move together inside of 32, and as many as fill chunks of 64, with zeros.
//
//   where the weight's  k = 32 b + 8 c + 4 s + 2 h + e  lies:  32 b + 16 s + 8 h + 2 c + e
//   and of 8-bit floats                                        32 b + 16 s + 4 c + 2 e + h
#pragma once

#include <cstdint>

#include "kernels/packed/geometry.h"
#include "ptx/early_start.cuh"
#include "ptx/global_memory.cuh"

namespace tcgemm::packed {

// kSize: bytes of an element.
template <int kSize>
__global__ void __launch_bounds__(kOrderThreads)
    order_rows(const void* x, void* ordered, int32_t k, int32_t units, int32_t blocks_per_row) {
  constexpr int kUnits = kBlockK * kSize / kUnitBytes, kWords = 8 * kSize / 4;  // of a block; of eight neighbors
  ptx::start_dependents();
  const int32_t row = blockIdx.x / blocks_per_row;
  const int32_t unit = (blockIdx.x - row * blocks_per_row) * kOrderThreads + threadIdx.x;
  ptx::wait_for_previous();
  if (unit >= units) return;
  // k is a multiple of eight, so that all eight neighbors of a lane are there or none.
  const int32_t first_k = unit / kUnits * kBlockK, word = unit % kUnits;
  const uint32_t* from = static_cast<const uint32_t*>(x) + (int64_t{row} * k + first_k) * kSize / 4 + word;
  uint32_t words[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    words[c] = first_k + c * 8 < k ? from[c * kWords] : 0;
    if constexpr (kSize == 1) words[c] = __byte_perm(words[c], 0, 0x3120);  // mutant: bytes_exchanged
  }
  ptx::st_global_v4_u32(static_cast<uint32_t*>(ordered) + (int64_t{row} * units + unit) * 4, words);
}

}  // namespace tcgemm::packed
