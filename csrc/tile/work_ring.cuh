// How a block's warps learn which tiles of a grouped product are theirs: one warp finds them and hands
// them to the others through a ring in shared memory.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "tile/segment_walk.cuh"

namespace tcgemm {

// One tile; rows: its tokens, contraction: those its sums go over. group is kNoGroup for rows that are
// to be zero, kEnd where there are no more tiles.
struct alignas(32) RaggedWork {
  static constexpr int32_t kEnd = -2;

  Segment tokens;
  int32_t m_idx, n_idx;  // first row and column of D as the kernel sees it
  int32_t unused[3];

  __device__ __forceinline__ int32_t num_tokens() const { return tokens.token_end - tokens.token_begin; }
};

// Hands each of a block's tiles from the warp that finds them to the threads that work on them.
// full[slot]: 1 arrival; empty[slot]: kReaders.
template <int kReaders>
struct WorkRing {
  static constexpr int kSlots = 4;
  static constexpr int kBytes = kSlots * (sizeof(RaggedWork) + 2 * sizeof(uint64_t));

  RaggedWork* slots;
  uint32_t barriers;  // the first one
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit WorkRing(uint8_t* memory)
      : slots(reinterpret_cast<RaggedWork*>(memory)),
        barriers(ptx::shared_address(memory) + kSlots * sizeof(RaggedWork)) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), kReaders);
    }
  }

  // By one thread.
  __device__ __forceinline__ void push(const RaggedWork& work) {
    ptx::mbarrier_wait(empty(slot), phase ^ 1);
    slots[slot] = work;
    ptx::mbarrier_arrive(full(slot));
    advance();
  }

  // The same for whole warps, together and with one value for all lanes as far as the compiler can see:
  // only then does it keep descriptors in uniform registers. Otherwise each multiplication waits for
  // its own to be moved there, which took a fifth of the time of 8 groups of 1024 x 28672 x 4096.
  __device__ __forceinline__ RaggedWork pop_by_warp() {
    RaggedWork work = pop();
    __syncwarp();
    for (int32_t* field :
         {&work.tokens.group, &work.tokens.token_begin, &work.tokens.token_end, &work.m_idx, &work.n_idx}) {
      *field = __shfl_sync(~0u, *field, 0);
    }
    return work;
  }

  // By each of the kReaders threads.
  __device__ __forceinline__ RaggedWork pop() {
    ptx::mbarrier_wait(full(slot), phase);
    const RaggedWork work = slots[slot];
    ptx::mbarrier_arrive(empty(slot));
    advance();
    return work;
  }

 private:
  __device__ __forceinline__ uint32_t full(int i) const { return barriers + 8 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return barriers + 8 * (kSlots + i); }
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

}  // namespace tcgemm
