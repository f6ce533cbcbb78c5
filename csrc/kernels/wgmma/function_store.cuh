// A generated function of a consumer warpgroup's accumulators, in their registers. D then leaves them as a bare product
// does; the function's other results are stored as they are computed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/function.cuh"
#include "kernels/wgmma/params.cuh"
#include "ptx/types.cuh"

namespace tcgemm::wgmma_family {

// A thread's sums of kGroups groups of eight columns, and, of a gated product, those of its second matrix. Sum 4 * j +
// 2 * h + i is that of row `line` + 8 * h and column `across` + 8 * j + lane % 4 * 2 + i of the kernel's (possibly
// swapped) problem. In parts of a few groups, of which each one's loads are under way while the one before is computed.
template <typename F, bool kSwapped, bool kWhole, int kGroups>
class FunctionParts {
 public:
  // `groups`: how many there are; all, unless that is not known where it is compiled.
  __device__ __forceinline__ FunctionParts(const epilogue::FunctionParams& params, const epilogue::BatchPlace& batch,
                                           int lane, int32_t line, int32_t across, int groups = kGroups)
      : params_(params), batch_(batch), lane_(lane), line_(line), across_(across), groups_(groups) {}

  __device__ __forceinline__ void run(float* sums, const float* up) const {
    auto tile = begin<0>();
    run_from<0>(tile, sums, up);
  }

 private:
  // What is read along the groups of swapped tiles is read one by one.
  static constexpr int kPart = kSwapped ? 2 : 4;
  template <int kFirst>
  using Tile = epilogue::FunctionTile<F, kSwapped, F::kStoresRows, kWhole,
                                      (kGroups - kFirst < kPart ? kGroups - kFirst : kPart), 2>;

  template <int kFirst>
  __device__ __forceinline__ Tile<kFirst> begin() const {
    return Tile<kFirst>(params_, batch_, lane_, line_, across_ + 8 * kFirst, groups_ - kFirst);
  }

  template <int kFirst>
  __device__ __forceinline__ void run_from(Tile<kFirst>& tile, float* sums, const float* up) const {
    if constexpr (kFirst + kPart < kGroups) {
      auto next = begin<kFirst + kPart>();
      tile.run(sums + 4 * kFirst, up + 4 * kFirst);
      run_from<kFirst + kPart>(next, sums, up);
    } else {
      tile.run(sums + 4 * kFirst, up + 4 * kFirst);
    }
  }

  const epilogue::FunctionParams& params_;
  const epilogue::BatchPlace& batch_;
  const int lane_;
  const int32_t line_, across_;
  const int groups_;
};

// How many of these groups are computed by one piece of code that has about so many instructions for a sum: all, if
// that is little code, or so few that it stays in the instruction cache.
template <typename F>
constexpr int groups_at_once(int groups) {
  constexpr int kMostInstructions = 4096;
  int found = 1;
  for (int count = 1; count <= groups; ++count) {
    const bool is_even = count % 2 == 0 || count == groups;
    if (groups % count == 0 && is_even && (count <= 4 || 4 * count * F::kWork <= kMostInstructions)) found = count;
  }
  return found;
}

// All of a warpgroup's accumulators. Of a gated product the right half is of its second matrix, and what is stored by
// rows is left in the left one. (m_idx, n_idx): the first element.
template <typename F, bool kSwapped, int kBlocksM, int kAccumulators>
__device__ __forceinline__ void apply_function(float (&acc)[kBlocksM][kAccumulators],
                                               const epilogue::FunctionParams& params, int32_t m_idx, int32_t n_idx,
                                               int32_t batch_idx) {
  constexpr int kSums = kAccumulators / (F::kIsGated ? 2 : 1), kGroups = kSums / 4;
  const epilogue::BatchPlace batch(params, batch_idx);
  const int warp = ptx::tid_x() % 128 / 32, lane = ptx::tid_x() % 32;
  const int32_t line = m_idx + warp * 16 + lane / 4;
  // Whether D has all of the tile.
  const int32_t m_end = (kSwapped ? n_idx + 2 * kSums : m_idx + 64 * kBlocksM);
  const int32_t n_end = (kSwapped ? m_idx + 64 * kBlocksM : n_idx + 2 * kSums);
  const bool is_whole = m_end <= params.m && n_end <= params.n && (kSwapped || params.in_eights);

  // Part by part by the same code.
  const auto apply_in_turns = [&](auto whole, auto at_once) {
    constexpr int kAtOnce = at_once.value, kTurns = (kGroups + kAtOnce - 1) / kAtOnce;
#pragma unroll 1
    for (int turn = 0; turn < kBlocksM * kTurns; ++turn) {
      float sums[4 * kAtOnce], up[4 * kAtOnce];
      // Registers have no index that changes.
      const auto visit = [&](auto copy) {
#pragma unroll
        for (int i = 0; i < kBlocksM * kTurns; ++i) {
          if (i != turn) continue;
          asm volatile("");  // keeps this a branch: of all turns' values selected, few would be wanted
#pragma unroll
          for (int v = 0; v < 4 * kAtOnce; ++v) {
            const int place = i % kTurns * 4 * kAtOnce + v;
            if (place < kSums) copy(i / kTurns, place, v);
          }
        }
      };
      visit([&](int block, int place, int v) {
        sums[v] = acc[block][place];
        if constexpr (F::kIsGated) up[v] = acc[block][kSums + place];
      });
      const int first = turn % kTurns * kAtOnce;
      const FunctionParts<F, kSwapped, whole.value, kAtOnce> parts(params, batch, lane, line + turn / kTurns * 64,
                                                                   n_idx + first * 8, min(kAtOnce, kGroups - first));
      parts.run(sums, up);
      if constexpr (F::kStoresRows) visit([&](int block, int place, int v) { acc[block][place] = sums[v]; });
    }
  };

  if (!is_whole) return apply_in_turns(std::false_type{}, std::integral_constant<int, (kGroups < 4 ? kGroups : 4)>{});
  if constexpr (groups_at_once<F>(kBlocksM * kGroups) == kBlocksM * kGroups) {
#pragma unroll
    for (int block = 0; block < kBlocksM; ++block) {
      const FunctionParts<F, kSwapped, true, kGroups> parts(params, batch, lane, line + block * 64, n_idx);
      parts.run(acc[block], acc[block] + (F::kIsGated ? kSums : 0));
    }
  } else {
    apply_in_turns(std::true_type{}, std::integral_constant<int, groups_at_once<F>(kGroups)>{});
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
