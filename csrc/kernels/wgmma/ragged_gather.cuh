// Tokens that are gathered: rows of a matrix in any order, which TMA cannot load in one instruction on
// Hopper. One instruction for each row of 128 bytes could be multicast, but would be 128 of them for a k
// block of 1024 clocks, from one unit; 64 threads that each copy sixteen times 16 bytes by cp.async take a
// fraction of their issue slots. So a block gathers its own tokens and shares none.
#pragma once

#include <cstdint>

#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/ragged_traits.cuh"
#include "ptx/cp_async.cuh"

namespace tcgemm::wgmma_family {

// Copies a tile's tokens to the stages, by kGatherThreads threads of which this is number `thread_idx`:
// eight of them, with 16 bytes each, have a row of 64 elements of k; rows are 8 apart. Rows beyond the
// tile's tokens and indices of no row give zeros, and so do columns beyond k, which is a multiple of 8.
template <typename T>
class TokenGather {
 public:
  // The units that are counted: elements of k, of rows that are a whole number of them.
  static constexpr int kVector = 8;

  __device__ __forceinline__ TokenGather(const Gather& source, int32_t k, const RaggedWork& work, int thread_idx)
      : rows_(static_cast<const uint4*>(source.rows)),
        vectors_(k / kVector),
        first_row_(thread_idx / 8),
        vector_(thread_idx % 8) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * kRowStep;
      // From L2, as the sizes: this kernel may have begun before the one that wrote the indices.
      const int32_t index = row < work.num_tokens() ? __ldcg(source.indices + work.n_idx + row) : -1;
      begins_[i] = index >= 0 && index < source.num_rows ? index * vectors_ : -1;
    }
  }

  // The k block number `block` of the first `width` rows; arrives at `barrier` once all is there.
  __device__ __forceinline__ void load(uint32_t tile, uint32_t barrier, int32_t width, int32_t block) const {
    // Of a row's eight units of 16 bytes TMA's swizzle flips the number by the row's.
    const uint32_t target = tile + first_row_ * 128 + (vector_ ^ first_row_) * 16;
    const int32_t vector = block * 8 + vector_;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_row_ + i * kRowStep >= width) break;
      const bool is_there = vector < vectors_ && begins_[i] >= 0;
      // Added in 32 bits: 16 rows' addresses, which the compiler would keep, take too many registers.
      const uint32_t from = is_there ? begins_[i] + vector : 0;
      ptx::cp_async_16(target + i * kRowStep * 128, rows_ + from, is_there);
    }
    ptx::cp_async_mbarrier_arrive_noinc(barrier);
  }

 private:
  static constexpr int kRowStep = T::kGatherThreads / 8, kRows = T::Config::kTileN / kRowStep;
  static_assert(kRowStep == 8, "rows of a thread lie in one place of their swizzle groups");

  const uint4* rows_;
  int32_t vectors_, first_row_, vector_;
  int32_t begins_[kRows];  // of each row, in vectors; -1 where there is none
};

}  // namespace tcgemm::wgmma_family
