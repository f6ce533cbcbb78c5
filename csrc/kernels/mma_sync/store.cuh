// From accumulators to D: partial sums pass through shared memory, so that the epilogue sees rows
// and D is written in whole 16-byte vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/function.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/mma_sync/mainloop.cuh"
#include "kernels/mma_sync/params.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::mma {

// The address of a warp's staged element.
template <typename Traits>
__device__ __forceinline__ uint32_t staged(uint32_t staging, int slot, int column) {
  static_assert(sizeof(typename Traits::Partial) == 4, "an element is a word");
  return staging + (slot * Traits::kStagingPitch + column) * 4;
}

// kCount adjacent ones: one, or whole vectors.
template <typename Traits, int kCount>
__device__ __forceinline__ void load_staged(typename Traits::Partial (&values)[kCount], uint32_t staging, int slot,
                                            int column) {
  if constexpr (kCount == 1) {
    const uint32_t word = ptx::ld_shared_u32(staged<Traits>(staging, slot, column));
    memcpy(values, &word, 4);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 words = ptx::ld_shared_v4_u32(staged<Traits>(staging, slot, column + i));
      memcpy(values + i, &words, 16);
    }
  }
}

// Writes 16 rows of accumulators to the warp's staging rows: row g or g + 8 of the instruction's
// tile in this order, columns where they belong. Adjacent columns of a lane go in one store.
template <typename Traits>
__device__ __forceinline__ void stage_rows(uint32_t staging,
                                           const typename Traits::Instruction::Accumulator (&row)[Traits::kMmasN]) {
  using Partial = typename Traits::Partial;
  // Columns 2 * (lane % 4) and + 1 of kRun tiles are 2 * kRun adjacent columns.
  constexpr int kRun = Traits::B::kOrder == FragmentOrder::kPairs ? 2 : 1;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = half * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < Traits::kMmasN; j += kRun) {
      Partial values[2 * kRun];
#pragma unroll
      for (int i = 0; i < 2 * kRun; ++i)
        values[i] = Traits::Instruction::element(row[j + i % kRun], half * 2 + i / kRun);
      const int column = fragment_row<Traits::B::kOrder>(j, lane % 4 * 2);
      uint32_t words[2 * kRun];
      memcpy(words, values, sizeof(words));
      if constexpr (kRun == 2) {
        ptx::st_shared_v4_u32(staged<Traits>(staging, slot, column), words);
      } else {
        ptx::st_shared_v2_u32(staged<Traits>(staging, slot, column), words);
      }
    }
  }
}

// Where a warp's tile lies in the output.
struct WarpTile {
  int split_idx, batch_idx;
  uint32_t m_idx, n_idx;  // up to a tile past 2^31

  template <typename Out>
  __device__ __forceinline__ Out* output_matrix(const Params& params) const {
    const int64_t d_batch_idx = split_idx * params.batch + batch_idx;
    return static_cast<Out*>(params.d) + d_batch_idx * params.m * params.n;
  }
};

// Word `word` of the converted values.
template <typename Out, int kCount, typename Partial>
__device__ __forceinline__ uint32_t pack_word(const Partial (&values)[kCount], int word) {
  constexpr int kPerWord = 4 / sizeof(Out);
  alignas(4) Out out[kPerWord];
#pragma unroll
  for (int i = 0; i < kPerWord; ++i) out[i] = convert<Out>(values[word * kPerWord + i]);
  uint32_t bits;
  memcpy(&bits, out, 4);
  return bits;
}

// One element, or 16 bytes.
template <typename Out, int kCount, typename Partial>
__device__ __forceinline__ void store_values(Out* destination, const Partial (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *destination = convert<Out>(values[0]);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) words[word] = pack_word<Out>(values, word);
    ptx::st_global_v4_u32(destination, words);
  }
}

// Applies the epilogue to the staged rows of instruction row `mma_idx` and stores them, kCount
// adjacent columns at a time: either one element or 16 bytes.
template <typename Traits, typename Out, int kCount, typename Functor>
__device__ __forceinline__ void store_rows(const Params& params, const Functor& functor, uint32_t staging, int mma_idx,
                                           const WarpTile& warp_tile) {
  using Partial = typename Traits::Partial;
  constexpr int kVectorsPerRow = Traits::Config::kWarpN / kCount;
  constexpr int kIterations = 16 * kVectorsPerRow / 32;
  // Vectors: two at once, so that their shared-memory latencies overlap. Elements: the rare path, small.
  constexpr int kAtOnce = kCount == 1 ? 1 : 2;
  static_assert(kIterations % kAtOnce == 0, "a lane stores as many at once every time");
  const int lane = threadIdx.x % 32;
  Out* const d = warp_tile.output_matrix<Out>(params);
#pragma unroll 1
  for (int first = lane; first < 32 * kIterations; first += 32 * kAtOnce) {
    Partial values[kAtOnce][kCount];
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      const int i = first + 32 * at;
      load_staged<Traits>(values[at], staging, i / kVectorsPerRow, i % kVectorsPerRow * kCount);
    }
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      const int i = first + 32 * at, slot = i / kVectorsPerRow, column = i % kVectorsPerRow * kCount;
      const int row = fragment_row<Traits::A::kOrder>(mma_idx * 2 + slot / 8, slot % 8);
      const int64_t m_idx = int64_t{warp_tile.m_idx} + row, n_idx = int64_t{warp_tile.n_idx} + column;
      if (m_idx >= params.m || n_idx >= params.n) continue;
      functor(values[at], warp_tile.batch_idx, m_idx, n_idx);
      Out* const destination = d + m_idx * params.n + n_idx;
      store_values(destination, values[at]);
    }
  }
}

// Stores the staged rows into D's transpose, whose rows are the staged columns: kCount neighbors of the 16 in a column
// at a time. Where D is its own transpose, so is C, whose elements are read from where they are stored.
template <typename Traits, typename Out, int kCount, typename Functor>
__device__ __forceinline__ void store_columns(const Params& params, const Functor& functor, uint32_t staging,
                                              int mma_idx, const WarpTile& warp_tile) {
  using Partial = typename Traits::Partial;
  constexpr FragmentOrder kOrder = Traits::A::kOrder;
  constexpr int kVectorsPerColumn = 16 / kCount, kColumnsAtOnce = 32 / kVectorsPerColumn;
  static_assert(kCount <= 8, "neighboring rows come in runs of 8");
  static_assert(Traits::Config::kWarpN % kColumnsAtOnce == 0, "columns are stored as many at once every time");
  const int lane = threadIdx.x % 32;
  const int run = lane % kVectorsPerColumn * kCount / 8, in_run = lane % kVectorsPerColumn * kCount % 8;
  const int64_t m_idx = int64_t{warp_tile.m_idx} + run_row<kOrder>(mma_idx, run) + in_run;
  if (m_idx >= params.m) return;
  Out* const d = warp_tile.output_matrix<Out>(params);
#pragma unroll 1
  for (int column = lane / kVectorsPerColumn; column < Traits::Config::kWarpN; column += kColumnsAtOnce) {
    const int64_t n_idx = int64_t{warp_tile.n_idx} + column;
    if (n_idx >= params.n) return;
    Partial values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Partial one[1];
      load_staged<Traits>(one, staging, run_slot<kOrder>(run, in_run + i), column);  // mutant: mirrored_slot
      values[i] = one[0];
    }
    functor(values, warp_tile.batch_idx, n_idx, m_idx);  // mutant: mirrored_c
    store_values(d + n_idx * params.n + m_idx, values);  // mutant: mirrored_place
  }
}

// A function of the staged rows, 8 neighbors and 32 columns of them at a time, of which a thread has what
// epilogue/function.cuh wants. It stores what it makes of them itself.
template <typename Traits, typename F>
__device__ __forceinline__ void store_rows_function(const epilogue::FunctionParams& params, uint32_t staging,
                                                    int mma_idx, const WarpTile& warp_tile) {
  constexpr int kGroups = 4;
  static_assert(Traits::Config::kWarpN % (8 * kGroups) == 0, "parts cover a row");
  const int lane = threadIdx.x % 32;
  const epilogue::MatrixIndex batch(params, warp_tile.batch_idx);
#pragma unroll 1
  for (int eight = 0; eight < 2; ++eight) {
    constexpr FragmentOrder kOrder = Traits::A::kOrder;
    const auto m_idx = static_cast<int32_t>(warp_tile.m_idx) + run_row<kOrder>(mma_idx, eight);
    const int slot = run_slot<kOrder>(eight, lane / 4);
#pragma unroll 1
    for (int column = 0; column < Traits::Config::kWarpN; column += 8 * kGroups) {
      const auto n_idx = static_cast<int32_t>(warp_tile.n_idx) + column;
      if (m_idx >= params.m || n_idx >= params.n) continue;
      epilogue::run_on_eight_rows<F, kGroups>(params, batch, m_idx, n_idx, [&](auto, auto& acc) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          uint32_t words[2];
          ptx::ld_shared_v2_u32(words[0], words[1], staged<Traits>(staging, slot, column + 8 * group + lane % 4 * 2));
          memcpy(acc[0] + 2 * group, words, sizeof(words));
        }
      });
    }
  }
}

template <typename Traits, typename Out, bool kIsSymmetric, typename Functor>
__device__ __forceinline__ void store_rows_as(const Params& params, const Functor& functor, uint32_t staging,
                                              int mma_idx, const WarpTile& warp_tile) {
  const auto store = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    store_rows<Traits, Out, kCount>(params, functor, staging, mma_idx, warp_tile);
    if constexpr (kIsSymmetric) {
      // Squares on the diagonal are computed whole.
      constexpr uint32_t kSide = Traits::Config::kTile.symmetric_side();
      const bool is_below = warp_tile.m_idx / kSide != warp_tile.n_idx / kSide;  // mutant: diagonal_mirrored_alone
      // mutant: not_mirrored
      if (is_below) store_columns<Traits, Out, kCount>(params, functor, staging, mma_idx, warp_tile);
    }
  };
  if (params.stores_vectors) {
    store(std::integral_constant<int, 16 / sizeof(Out)>{});
  } else {
    store(std::integral_constant<int, 1>{});
  }
}

// Every lane of the warp calls this; no other warp touches `staging`.
template <typename Traits, typename Epilogue>
__device__ __forceinline__ void store_tile(const Params& params, const Epilogue& stored_by,
                                           const typename Traits::Accumulators& accumulators, uint32_t staging,
                                           const WarpTile& warp_tile) {
  using Partial = typename Traits::Partial;
  using Base = typename SymmetryOf<Epilogue>::Base;
  constexpr bool kIsSymmetric = SymmetryOf<Epilogue>::kIsSymmetric;
  // Rolled, with the register choice as a branch: the output paths then exist once.
#pragma unroll 1
  for (int mma_idx = 0; mma_idx < Traits::kMmasM; ++mma_idx) {
#pragma unroll
    for (int i = 0; i < Traits::kMmasM; ++i) {
      if (i == mma_idx) stage_rows<Traits>(staging, accumulators[i]);
    }
    __syncwarp();
    const auto store_as = [&](auto out) {
      using Out = decltype(out);
      const epilogue::Identity<Partial, Out> functor{};
      store_rows_as<Traits, Out, kIsSymmetric>(params, functor, staging, mma_idx, warp_tile);
    };
    if constexpr (std::is_same_v<Base, Bare>) {
      visit_float(params.out, store_as);
    } else if constexpr (std::is_same_v<Base, Scaled>) {
      store_rows_as<Traits, int32_t, kIsSymmetric>(params, static_cast<const Base&>(stored_by), staging, mma_idx,
                                                   warp_tile);
    } else {
      store_rows_function<Traits, typename Epilogue::Code>(stored_by, staging, mma_idx, warp_tile);
    }
    __syncwarp();
  }
}

}  // namespace tcgemm::mma
