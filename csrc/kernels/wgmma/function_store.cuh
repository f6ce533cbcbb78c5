// A generated function of a consumer warpgroup's accumulators, in their registers. D then leaves them as a bare product
// does; the function's other results are stored as they are computed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/function.cuh"
#include "kernels/wgmma/params.cuh"
#include "ptx/types.cuh"

namespace tcgemm::wgmma_family {

// The sums of kGroups times eight columns of a thread's rows, of which there are `groups`, and, of a gated product,
// those of its second matrix. Sum 4 * j + 2 * h + i is that of row warp * 16 + h * 8 + lane / 4 and column 8 * j + lane
// % 4 * 2 + i. (row, column): of the first one, in the kernel's (possibly swapped) problem.
template <typename F, bool kSwapped, bool kWhole, int kGroups>
__device__ __forceinline__ void apply_function_to(float (&sums)[4 * kGroups], const float (&up)[4 * kGroups],
                                                  const epilogue::FunctionParams& params,
                                                  const epilogue::BatchPlace& batch, int32_t row, int32_t column,
                                                  int groups) {
  constexpr int kMost = kSwapped && kGroups <= 4 ? 2 : 4, kAtOnce = kGroups < kMost ? kGroups : kMost;
  using Tile = epilogue::FunctionTile<F, kSwapped, F::kStoresRows, kWhole, kAtOnce, 2>;
  const auto tile = [&](int first) {
    const int32_t along = column + 8 * first;
    return Tile(params, batch, kSwapped ? along : row, kSwapped ? row : along, groups - first);
  };
  if constexpr (kGroups == 2 * kAtOnce) {
    // The loads of both are under way before either is waited for.
    Tile first = tile(0), second = tile(kAtOnce);
    first.run(sums, up);
    second.run(sums + 4 * kAtOnce, up + 4 * kAtOnce);
  } else {
#pragma unroll
    for (int first = 0; first < kGroups; first += kAtOnce) tile(first).run(sums + 4 * first, up + 4 * first);
  }
}

// All of a warpgroup's accumulators, part by part by the same code: so many at a time that little else is done for
// each, so few that the code stays in the instruction cache and registers are left. Of a gated product the right half
// is of its second matrix, and what is stored by rows is left in the left one. (m_idx, n_idx): the first element.
// Columns of the tile that are rows beyond the batch entry's last may be left as they are.
template <typename F, bool kSwapped, int kRegisters, int kBlocksM, int kAccumulators>
__device__ __forceinline__ void apply_function(float (&acc)[kBlocksM][kAccumulators],
                                               const epilogue::FunctionParams& params, int32_t m_idx, int32_t n_idx,
                                               const epilogue::BatchPlace& batch) {
  constexpr int kSets = F::kIsGated ? 2 : 1, kSums = kAccumulators / kSets;
  constexpr int kWanted = kRegisters - kBlocksM * kAccumulators >= 64 * kSets + 32 ? 8 : 4;
  constexpr int kAllGroups = kSums / 4;
  constexpr int kGroups = kWanted < kAllGroups ? kWanted : kAllGroups, kPart = 4 * kGroups;
  constexpr int kParts = (kAllGroups + kGroups - 1) / kGroups;
  const int warp = ptx::tid_x() % 128 / 32, lane = ptx::tid_x() % 32;
  // Whether D has all of the tile.
  const int32_t m_end = (kSwapped ? n_idx + 2 * kSums : m_idx + 64 * kBlocksM);
  const int32_t n_end = (kSwapped ? m_idx + 64 * kBlocksM : n_idx + 2 * kSums);
  const bool is_whole = m_end <= batch.m_end && n_end <= params.n && (kSwapped || params.in_eights);
  const auto apply = [&](auto whole) {
#pragma unroll 1
    for (int part = 0; part < kBlocksM * kParts; ++part) {
      if (kSwapped && n_idx + part % kParts * kGroups * 8 >= batch.m_end) continue;
      float sums[kPart], up_sums[kPart];
      // Registers have no index that changes.
      const auto visit = [&](auto copy) {
#pragma unroll
        for (int i = 0; i < kBlocksM * kParts; ++i) {
          if (i != part) continue;
#pragma unroll
          for (int v = 0; v < kPart; ++v) {
            if (i % kParts * kPart + v < kSums) copy(i / kParts, i % kParts * kPart + v, v);
          }
        }
      };
      visit([&](int block, int place, int v) {
        sums[v] = acc[block][place];
        if constexpr (F::kIsGated) up_sums[v] = acc[block][kSums + place];
      });
      const int32_t row = m_idx + part / kParts * 64 + warp * 16 + lane / 4;
      const int32_t column = n_idx + part % kParts * kGroups * 8 + lane % 4 * 2;
      const int groups = kAllGroups % kGroups == 0 ? kGroups : kAllGroups - part % kParts * kGroups;
      apply_function_to<F, kSwapped, whole.value, kGroups>(sums, up_sums, params, batch, row, column, groups);
      if constexpr (F::kStoresRows) visit([&](int block, int place, int v) { acc[block][place] = sums[v]; });
    }
  };
  if (is_whole) {
    apply(std::true_type{});
  } else {
    apply(std::false_type{});
  }
}

// The left half of a warpgroup's accumulators.
template <int kBlocksM, int kHalf>
__device__ __forceinline__ void take_left(float (&left)[kBlocksM][kHalf], const float (&acc)[kBlocksM][2 * kHalf]) {
#pragma unroll
  for (int i = 0; i < kBlocksM * kHalf; ++i) left[i / kHalf][i % kHalf] = acc[i / kHalf][i % kHalf];
}

// Brings what the function reads of a warpgroup's tile to L2 while the product is being multiplied.
template <typename F, typename Config, int kRows>
__device__ __forceinline__ void prefetch_function(const epilogue::FunctionParams& params, int32_t m_idx, int32_t n_idx,
                                                  int32_t batch_idx) {
  constexpr bool kSwapped = Config::kSwapped;
  epilogue::FunctionPrefetch<F>{params,
                                epilogue::BatchPlace(params, batch_idx),
                                kSwapped ? n_idx : m_idx,
                                kSwapped ? m_idx : n_idx,
                                kSwapped ? Config::kTileN : kRows,
                                kSwapped ? kRows : Config::kTileN / (F::kIsGated ? 2 : 1),
                                static_cast<int>(ptx::tid_x() % 128),
                                128}
      .run();
}

}  // namespace tcgemm::wgmma_family
