// From accumulators to D: partial sums pass through shared memory, so that the epilogue sees rows
// and D is written in whole 16-byte vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/mma_sync/mainloop.cuh"
#include "kernels/mma_sync/params.cuh"
#include "ptx/global_memory.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::mma {

// Writes 16 rows of accumulators to the warp's staging rows: row g or g + 8 of the instruction's
// tile in this order, columns where they belong. Adjacent columns of a lane go in one store.
template <typename Traits>
__device__ __forceinline__ void stage_rows(typename Traits::Partial* staging,
                                           const typename Traits::Instruction::Accumulator (&row)[Traits::kMmasN]) {
  using Partial = typename Traits::Partial;
  // Columns 2 * (lane % 4) and + 1 of kRun tiles are 2 * kRun adjacent columns.
  constexpr int kRun = Traits::B::kOrder == FragmentOrder::kPairs ? 2 : 1;
  using Vector = std::conditional_t<kRun == 2, uint4, uint2>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Partial* slot = staging + (half * 8 + lane / 4) * Traits::kStagingPitch;
#pragma unroll
    for (int j = 0; j < Traits::kMmasN; j += kRun) {
      alignas(16) Partial values[2 * kRun];
#pragma unroll
      for (int i = 0; i < 2 * kRun; ++i)
        values[i] = Traits::Instruction::element(row[j + i % kRun], half * 2 + i / kRun);
      const int column = fragment_row<Traits::B::kOrder>(j, lane % 4 * 2);
      *reinterpret_cast<Vector*>(slot + column) = *reinterpret_cast<const Vector*>(values);
    }
  }
}

// Where a warp's tile lies in the output.
struct WarpTile {
  int split_idx, batch_idx;
  uint32_t m_idx, n_idx;  // up to a tile past 2^31
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

// Applies the epilogue to the staged rows of instruction row `mma_idx` and stores them, kCount
// adjacent columns at a time: either one element or 16 bytes.
template <typename Traits, typename Out, int kCount, typename Partial, typename Functor>
__device__ __forceinline__ void store_rows(const Params& params, const Functor& functor, const Partial* staging,
                                           int mma_idx, const WarpTile& warp_tile) {
  constexpr int kVectorsPerRow = Traits::Config::kWarpN / kCount;
  constexpr int kIterations = 16 * kVectorsPerRow / 32;
  const int lane = threadIdx.x % 32;
  const int64_t d_batch_idx = warp_tile.split_idx * params.batch + warp_tile.batch_idx;
  Out* const d = static_cast<Out*>(params.d) + d_batch_idx * params.m * params.n;
  // Vectors: two at once, so that their shared-memory latencies overlap. Elements: the rare path, small.
#pragma unroll(kCount == 1 ? 1 : 2)
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    const int i = iteration * 32 + lane;
    const int slot = i / kVectorsPerRow;
    const int column = i % kVectorsPerRow * kCount;
    const int64_t m_idx = int64_t{warp_tile.m_idx} + fragment_row<Traits::A::kOrder>(mma_idx * 2 + slot / 8, slot % 8);
    const int64_t n_idx = int64_t{warp_tile.n_idx} + column;
    if (m_idx >= params.m || n_idx >= params.n) continue;
    alignas(16) Partial values[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = staging[slot * Traits::kStagingPitch + column + j];
    functor(values, warp_tile.batch_idx, m_idx, n_idx);
    Out* const destination = d + m_idx * params.n + n_idx;
    if constexpr (kCount == 1) {
      *destination = convert<Out>(values[0]);
    } else {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) words[word] = pack_word<Out>(values, word);
      ptx::st_global_v4_u32(destination, words);
    }
  }
}

// The same with an epilogue that stores by itself, 4 columns at a time: half the code of 8.
template <typename Traits>
__device__ __forceinline__ void store_rows_fused(const Params& params, const Fused& fused, const float* staging,
                                                 int mma_idx, const WarpTile& warp_tile) {
  constexpr int kCount = 4, kVectorsPerRow = Traits::Config::kWarpN / kCount;
  const int lane = threadIdx.x % 32;
  const int64_t d_batch_idx = warp_tile.split_idx * params.batch + warp_tile.batch_idx;
#pragma unroll 1
  for (int i = lane; i < 16 * kVectorsPerRow; i += 32) {
    const int slot = i / kVectorsPerRow, column = i % kVectorsPerRow * kCount;
    const int64_t m_idx = int64_t{warp_tile.m_idx} + fragment_row<Traits::A::kOrder>(mma_idx * 2 + slot / 8, slot % 8);
    const int64_t n_idx = int64_t{warp_tile.n_idx} + column;
    if (m_idx >= params.m || n_idx >= params.n) continue;
    float values[kCount], up[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = staging[slot * Traits::kStagingPitch + column + j];
    fused.store(values, up, d_batch_idx, m_idx, n_idx, static_cast<int>(min(params.n - n_idx, int64_t{kCount})));
  }
}

template <typename Traits, typename Out, typename Partial, typename Functor>
__device__ __forceinline__ void store_rows_as(const Params& params, const Functor& functor, const Partial* staging,
                                              int mma_idx, const WarpTile& warp_tile) {
  if (params.stores_vectors) {
    store_rows<Traits, Out, 16 / sizeof(Out)>(params, functor, staging, mma_idx, warp_tile);
  } else {
    store_rows<Traits, Out, 1>(params, functor, staging, mma_idx, warp_tile);
  }
}

// Every lane of the warp calls this; no other warp touches `staging`.
template <typename Traits, typename Epilogue>
__device__ __forceinline__ void store_tile(const Params& params, const Epilogue& stored_by,
                                           const typename Traits::Accumulators& accumulators,
                                           typename Traits::Partial* staging, const WarpTile& warp_tile) {
  using Partial = typename Traits::Partial;
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
      store_rows_as<Traits, Out>(params, epilogue::Identity<Partial, Out>{}, staging, mma_idx, warp_tile);
    };
    if constexpr (std::is_same_v<Epilogue, Fused>) {
      store_rows_fused<Traits>(params, stored_by, staging, mma_idx, warp_tile);
    } else if constexpr (std::is_same_v<Epilogue, Scaled>) {
      store_rows_as<Traits, int32_t>(params, stored_by, staging, mma_idx, warp_tile);
    } else {
      epilogue::visit(params.out, store_as);
    }
    __syncwarp();
  }
}

}  // namespace tcgemm::mma
