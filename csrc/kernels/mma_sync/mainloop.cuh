// The mainloop of a block: cp.async pipeline, fragment double buffer, mma.sync.
#pragma once

#include <cstdint>

#include "kernels/mma_sync/params.cuh"
#include "kernels/mma_sync/traits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace tcgemm::mma {

// All instructions of a k-step. After the first few, the fragments of the next step have arrived and
// are prepared, a share before each instruction.
template <typename Traits, bool kPrepares>
__device__ __forceinline__ void multiply_step(typename Traits::Accumulators& accumulators,
                                              const typename Traits::A::Fragments& a,
                                              const typename Traits::B::Fragments& b,
                                              typename Traits::A::Fragments& next_a,
                                              typename Traits::B::Fragments& next_b) {
  constexpr int kMmas = Traits::kMmasM * Traits::kMmasN;
  constexpr int kFirst = kMmas * 3 / 8;
  constexpr int kPairsA = Traits::A::kGroups / 2;
  constexpr int kPairs = kPairsA + Traits::B::kGroups / 2;
  int num_prepared = 0;
#pragma unroll
  for (int i = 0; i < Traits::kMmasM; ++i) {
    const uint32_t a_registers[4] = {a[2 * i][0], a[2 * i + 1][0], a[2 * i][1], a[2 * i + 1][1]};
#pragma unroll
    for (int step = 0; step < Traits::kMmasN; ++step) {
      const int mmas_since_first = i * Traits::kMmasN + step + 1 - kFirst;
#pragma unroll
      for (int pair = 0; kPrepares && pair < kPairs; ++pair) {
        if (pair < num_prepared || pair * (kMmas - kFirst) >= kPairs * mmas_since_first) continue;
        if (pair < kPairsA) {
          Traits::A::prepare(next_a, pair * 2);
        } else {
          Traits::B::prepare(next_b, (pair - kPairsA) * 2);
        }
        num_prepared = pair + 1;
      }
      // Serpentine: neighboring instructions share a register operand.
      const int j = i % 2 == 0 ? step : Traits::kMmasN - 1 - step;
      Traits::Instruction::multiply_add(accumulators[i][j], a_registers, b[j]);
    }
  }
}

// Copies by cp.async, one group a tile.
template <typename Traits>
struct GroupedCopies {
  static constexpr bool kRoundsToTF32 = false;

  // After the last part of a tile.
  __device__ __forceinline__ void close_tile() { ptx::cp_async_commit_group(); }

  // Until this thread's copies of the tile at `read_offset`, the next one to be read, are there.
  __device__ __forceinline__ void wait_tile(uint32_t) { ptx::cp_async_wait_group<Traits::Config::kStages - 2>(); }

  __device__ __forceinline__ void wait_all() { ptx::cp_async_wait_group<0>(); }
};

// The copy pipeline where every chunk of both operands is 16 aligned bytes, inside or outside as a
// whole. Nothing about edges is left to the loop but one bit for each chunk.
template <typename Traits>
struct AlignedCopies : GroupedCopies<Traits> {
  using A = typename Traits::A;
  using B = typename Traits::B;
  static_assert(A::kPasses + B::kPasses <= 32, "predicates are one 32-bit mask");

  typename A::Source a;
  typename B::Source b;
  uint32_t inside, inside_last;  // chunks inside the matrix: of this tile, of the last one
  int tiles_left;

  __device__ __forceinline__ AlignedCopies(const typename A::Source& a_source, const typename B::Source& b_source,
                                           int num_tiles, int k)
      : a(a_source), b(b_source), tiles_left(num_tiles) {
    inside_last = inside_mask(k - (num_tiles - 1) * Traits::kTileK);
    inside = num_tiles == 1 ? inside_last : inside_mask(Traits::kTileK);
  }

  __device__ __forceinline__ uint32_t inside_mask(int k_left) const {
    return A::inside_mask(a, k_left) | B::inside_mask(b, k_left) << A::kPasses;
  }

  // Part kPart of kParts of a tile.
  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t write_offset) {
    A::template copy_aligned<A::kPasses * kPart / kParts, A::kPasses*(kPart + 1) / kParts, 0>(a, write_offset, inside);
    B::template copy_aligned<B::kPasses * kPart / kParts, B::kPasses*(kPart + 1) / kParts, A::kPasses>(b, write_offset,
                                                                                                       inside);
    if constexpr (kPart == kParts - 1) {
      --tiles_left;
      if (tiles_left == 1) inside = inside_last;
      if (tiles_left == 0) inside = 0;
    }
  }
};

// The same for all other operands.
template <typename Traits>
struct UnalignedCopies : GroupedCopies<Traits> {
  using A = typename Traits::A;
  using B = typename Traits::B;

  typename A::Source a;
  typename B::Source b;
  int a_granularity, b_granularity;
  int k_left;  // elements of K not yet copied; negative once past the end

  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t write_offset) {
    if constexpr (kPart == 0) {
      A::copy_unaligned(a, write_offset, k_left, a_granularity);
      B::copy_unaligned(b, write_offset, k_left, b_granularity);
      k_left -= Traits::kTileK;
    }
  }
};

// The same as AlignedCopies by TMA, for sm_90 and later: one thread asks for the boxes of both tiles, a barrier for
// each stage counts their bytes. Float32 is rounded to TF32 on the way.
template <typename Traits>
struct TensorCopies {
  using Config = typename Traits::Config;
  using A = typename Traits::A;
  using B = typename Traits::B;
  static constexpr bool kRoundsToTF32 = true;

  const Params& params;
  const Work& work;
  uint32_t stages;
  int32_t k_idx;  // of the next tile to copy
  int tiles_to_copy, tiles_to_wait;
  uint32_t parity = 0;  // of the phase to wait for

  // Every thread of the block makes one.
  __device__ __forceinline__ TensorCopies(const Params& params, const Work& work, uint32_t stages)
      : params(params),
        work(work),
        stages(stages),
        k_idx(static_cast<int32_t>(work.k_begin)),
        tiles_to_copy(work.num_k_tiles(Traits::kTileK)),
        tiles_to_wait(tiles_to_copy) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) ptx::mbarrier_init(barrier(stage), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t barrier(int stage) const { return stages + Traits::kStagesBytes + 8 * stage; }

  template <int kPart, int kParts>
  __device__ __forceinline__ void copy(uint32_t write_offset) {
    if constexpr (kPart == 0) {
      if (threadIdx.x == 0 && tiles_to_copy > 0) copy_tile(write_offset);
      --tiles_to_copy;
      k_idx += Traits::kTileK;
    }
  }

  __device__ __forceinline__ void close_tile() {}

  __device__ __forceinline__ void wait_tile(uint32_t read_offset) {
    if (tiles_to_wait > 0) ptx::mbarrier_wait(barrier(read_offset / Traits::kStageBytes), parity);
    --tiles_to_wait;
    parity ^= read_offset == (Config::kStages - 1) * Traits::kStageBytes;
  }

  __device__ __forceinline__ void wait_all() {}

 private:
  __device__ __forceinline__ void copy_tile(uint32_t write_offset) const {
    const uint32_t full = barrier(write_offset / Traits::kStageBytes);
    ptx::mbarrier_arrive_expect_tx(full, Traits::kStageBytes);
    const uint32_t a_tile = stages + write_offset;
    copy_operand<A>(&params.a_map, params.a, a_tile, full, static_cast<int32_t>(work.m_idx));
    copy_operand<B>(&params.b_map, params.b, a_tile + A::kBytes, full, static_cast<int32_t>(work.n_idx));
  }

  template <typename Tile>
  __device__ __forceinline__ void copy_operand(const CUtensorMap* map, const BatchedMatrix<char>& matrix, uint32_t tile,
                                               uint32_t full, int32_t first) const {
    const int32_t batch_inner = static_cast<int32_t>(matrix.batch_inner);
    const int32_t outer = matrix.batch_outer_stride == 0 ? 0 : work.batch_idx / batch_inner;
    const int32_t inner = matrix.batch_inner_stride == 0 ? 0 : work.batch_idx % batch_inner;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      ptx::tma_load_4d(tile + panel * Tile::kPanelBytes, map, full,
                       (Tile::kKMajor ? k_idx : first) + panel * Tile::kBox.contiguous, Tile::kKMajor ? first : k_idx,
                       inner, outer);
    }
  }
};

template <typename Traits>
struct Mainloop {
  using Config = typename Traits::Config;
  using A = typename Traits::A;
  using B = typename Traits::B;

  uint32_t a_address, b_address;  // where this lane loads fragments, in stage 0
  uint32_t read_offset = 0, write_offset = 0;
  typename A::Fragments a_fragments[2];
  typename B::Fragments b_fragments[2];
  typename Traits::Accumulators accumulators = {};

  static __device__ __forceinline__ uint32_t next_stage(uint32_t offset) {
    constexpr uint32_t kLast = (Config::kStages - 1) * Traits::kStageBytes;
    return offset == kLast ? 0 : offset + Traits::kStageBytes;
  }

  template <typename Copies>
  __device__ __forceinline__ void finish_copy(Copies& copies) {
    copies.close_tile();
    write_offset = next_stage(write_offset);
  }

  // One k-step: loads the fragments of the next step, issues its share of the copies, multiplies.
  template <int kStep, typename Copies>
  __device__ __forceinline__ void run_step(Copies& copies) {
    constexpr int kNextStep = (kStep + 1) % Traits::kSteps;
    constexpr int kCopySteps = Traits::kSteps - 1;
    if constexpr (kNextStep == 0) {
      read_offset = next_stage(read_offset);
      copies.wait_tile(read_offset);
      __syncthreads();
    }
    A::template load<kNextStep>(a_fragments[kNextStep % 2], a_address + read_offset);
    B::template load<kNextStep>(b_fragments[kNextStep % 2], b_address + read_offset);
    if constexpr (kStep < kCopySteps) {
      copies.template copy<kStep, kCopySteps>(write_offset);
      if constexpr (kStep == kCopySteps - 1) finish_copy(copies);
    }
    multiply_step<Traits, !Copies::kRoundsToTF32>(accumulators, a_fragments[kStep % 2], b_fragments[kStep % 2],
                                                  a_fragments[kNextStep % 2], b_fragments[kNextStep % 2]);
  }

  // Copies beyond the last tile write zeros, or nothing, which nothing multiplies.
  template <typename Copies>
  __device__ __forceinline__ void run(Copies copies, int num_tiles) {
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages - 1; ++stage) {
      copies.template copy<0, 1>(write_offset);
      finish_copy(copies);
    }
    copies.wait_tile(read_offset);
    __syncthreads();
    A::template load<0>(a_fragments[0], a_address);
    B::template load<0>(b_fragments[0], b_address);
    if constexpr (!Copies::kRoundsToTF32) {
#pragma unroll
      for (int group = 0; group < A::kGroups; group += 2) A::prepare(a_fragments[0], group);
#pragma unroll
      for (int group = 0; group < B::kGroups; group += 2) B::prepare(b_fragments[0], group);
    }
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      run_step<0>(copies);
      run_step<1>(copies);
      if constexpr (Traits::kSteps == 4) {
        run_step<2>(copies);
        run_step<3>(copies);
      }
    }
    copies.wait_all();
    __syncthreads();
  }
};

}  // namespace tcgemm::mma
