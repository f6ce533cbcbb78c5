// A generated function of a consumer warpgroup's accumulators, in their registers. D then leaves them as a bare product
// does; the function's other results are stored as they are computed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/function.cuh"
#include "epilogue/function_prefetch.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/wgmma/function_boxes.cuh"
#include "kernels/wgmma/params.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace tcgemm::wgmma_family {

// Runs a generated function on all accumulators of a consumer warpgroup, one FunctionTile at a time: a "part" is 16
// rows of a warp by kPart groups of eight columns. Accumulator 4 * j + 2 * h + i of a block of 64 rows is row warp * 16
// + lane / 4 + 8 * h and column 8 * j + lane % 4 * 2 + i of the kernel's (possibly swapped) problem. In a gated
// product, the left half of a block is gate and the right half up, and D is left in the left half. Matrices: operands
// that TMA loads to shared memory, a BoxedPart, or NoMatrices.
template <typename F, bool kSwapped, int kBlocksM, int kAccumulators, typename Matrices = epilogue::NoMatrices>
class WarpgroupFunction {
 public:
  // (m_idx, n_idx): the tile's first element. Columns of swapped tiles past batch.m_end may stay as they are: they are
  // not stored. Constructed before the accumulators are complete, so that vectors are loaded ahead of the next tile's
  // operands.
  __device__ __forceinline__ WarpgroupFunction(const epilogue::FunctionParams& params, int32_t m_idx, int32_t n_idx,
                                               const epilogue::MatrixIndex& batch)
      : params_(params),
        batch_(batch),
        lane_(ptx::tid_x() % 32),
        line_(m_idx + ptx::tid_x() % 128 / 32 * 16 + lane_ / 4),
        across_(n_idx) {
    // Whether D has all of the tile.
    const int32_t m_end = (kSwapped ? n_idx + 2 * kAccs : m_idx + 64 * kBlocksM);
    const int32_t n_end = (kSwapped ? m_idx + 64 * kBlocksM : n_idx + 2 * kAccs);  // mutant: wrong_end
    // mutant: whole_where_the_rows_of_all_groups_are
    bool is_inside = m_end <= batch.m_end && n_end <= params.n;
    if constexpr (kClampsLoads) is_inside = !kSwapped || n_idx < batch.m_end;
    is_whole_ = is_inside && (kSwapped || params.in_eights) && (!Matrices::kHasAny || params.in_boxes);
    if constexpr (kUnrolled) {
      if (!is_whole_) return;
      vectors_.load_all(params_, batch_, lane_, line_, across_);
    }
  }

  // `boxes`: a BoxReader, where matrices are in shared memory.
  template <typename Boxes>
  __device__ __forceinline__ void apply(float (&acc)[kBlocksM][kAccumulators], Boxes& boxes) {
    if (!is_whole_) {
      if constexpr (Matrices::kHasAny) {
        if (params_.in_boxes) boxes.skip();
      }
      apply_in_loop<false>(acc);
    } else if constexpr (kUnrolled) {
      run_from<0>(acc, boxes, 0);
    } else {
      apply_in_loop<true>(acc);
    }
  }

 private:
  static constexpr int kAccs = kAccumulators / (F::kIsGated ? 2 : 1), kGroups = kAccs / 4;
  // Parts of swapped tiles are smaller: they load operands along groups element by element, which takes registers.
  static constexpr int kMostGroups = kSwapped ? 2 : 4, kPart = kGroups < kMostGroups ? kGroups : kMostGroups;
  static constexpr int kBlockParts = (kGroups + kPart - 1) / kPart, kNumParts = kBlocksM * kBlockParts;
  static constexpr bool kUnrolled = is_at_once<F>(kBlocksM * kAccs);
  // The loop over the parts of a swapped tile skips parts outside the product, instead of clamping their loads.
  static constexpr bool kClampsLoads = (kUnrolled || !kSwapped) && epilogue::kClampsLoads<F>;

  using Vectors = epilogue::FunctionVectors<F, kSwapped, kBlocksM, kGroups>;
  // Bytes of an element of the matrices that threads load themselves, for all groups of a part.
  static constexpr int kPartBytes =
      kPart * (F::bytes(epilogue::Along::kBoth) - (Matrices::kHasAny ? F::kBoxedBytes : 0));
  // How many parts ahead loads are issued: so many that their registers are 32 at most.
  static constexpr int kAhead = kPartBytes > 0 && kPartBytes <= 16 ? 32 / kPartBytes : 1;

  template <bool kWhole, typename Loaded = epilogue::NothingLoaded>
  using Tile = epilogue::FunctionTile<F, kSwapped, F::kStoresRows, kWhole, kPart, 2, Loaded>;
  using Loaded = epilogue::LoadedPart<Vectors, Matrices>;
  using PartTile = Tile<true, Loaded>;

  template <typename AnyTile, typename AnyLoaded>
  __device__ __forceinline__ AnyTile tile(int part, typename AnyTile::Reads& reads, const AnyLoaded& loaded) const {
    const int block = part / kBlockParts, first = part % kBlockParts * kPart;
    const int groups = min(kPart, kGroups - first);
    // mutant: a_turns_line
    return AnyTile(params_, batch_, lane_, line_ + 64 * block, across_ + 8 * first, groups, reads, loaded);
  }

  // The FunctionTile of a part, whose index is a template argument, since registers need constant indices. `step`: what
  // boxes.begin() returned for the 64 columns of the matrices in shared memory that contain this part.
  template <int kPartIdx>
  __device__ __forceinline__ PartTile part_tile(uint32_t step = 0) {
    constexpr int kFirst = kPartIdx % kBlockParts * kPart;
    Matrices matrices{};
    if constexpr (Matrices::kHasAny) {
      const int warp = ptx::tid_x() % 128 / 32;
      matrices = {step, kFirst % 8 * 8 + lane_ % 4 * 2, warp * 16 + lane_ / 4};
    }
    // mutant: another_parts_reads
    return tile<PartTile>(kPartIdx, reads_[kPartIdx], Loaded{vectors_, kPartIdx / kBlockParts, kFirst, matrices});
  }

  template <int kBegin, int kEnd>
  __device__ __forceinline__ void load_parts() {
    if constexpr (kBegin < kEnd && kBegin < kNumParts) {
      part_tile<kBegin>().load();
      load_parts<kBegin + 1, kEnd>();
    }
  }

  template <int kPartIdx, typename Boxes>
  __device__ __forceinline__ void run_from(float (&acc)[kBlocksM][kAccumulators], Boxes& boxes, uint32_t step) {
    if constexpr (kPartIdx < kNumParts) {
      if constexpr (kPartIdx == 0) load_parts<0, kAhead>();
      load_parts<kPartIdx + kAhead, kPartIdx + kAhead + 1>();
      constexpr int kFirst = kPartIdx % kBlockParts * kPart, kEnd = kFirst + kPart;
      constexpr bool kBeginsStep = kFirst % 8 == 0, kEndsStep = kEnd % 8 == 0 || kEnd >= kGroups;
      if constexpr (Matrices::kHasAny) {
        constexpr int kStep = kPartIdx / kBlockParts * Matrices::kStepsOfBlock + kFirst / 8;
        if constexpr (kBeginsStep) step = boxes.template begin<kStep>();
        run_part<kPartIdx>(acc, step);
        if constexpr (kEndsStep) boxes.template end<kStep>();
      } else {
        // Swapped tiles may have many parts outside the product.
        // mutant: a_part_is_left_out
        if (!kSwapped || !kClampsLoads || across_ + 8 * kFirst < batch_.m_end) run_part<kPartIdx>(acc, step);
      }
      run_from<kPartIdx + 1>(acc, boxes, step);
    }
  }

  template <int kPartIdx>
  __device__ __forceinline__ void run_part(float (&acc)[kBlocksM][kAccumulators], uint32_t step) {
    float* const part = acc[kPartIdx / kBlockParts] + kPartIdx % kBlockParts * kPart * 4;  // mutant: a_part_twice
    part_tile<kPartIdx>(step).run(part, part + (F::kIsGated ? kAccs : 0));
  }

  // Loops over the parts with one copy of the code: a part's accumulators are copied to `gate` and `up`, and D back.
  // Loads of the next part are issued before a part is computed.
  template <bool kWhole>
  __device__ __forceinline__ void apply_in_loop(float (&acc)[kBlocksM][kAccumulators]) const {
    // Whether a part is inside the product; swapped tiles may have many parts outside.
    const auto is_used = [&](int part) {
      return !kSwapped || kWhole || across_ + part % kBlockParts * kPart * 8 < batch_.m_end;
    };
    typename Tile<kWhole>::Reads reads;
    tile<Tile<kWhole>>(0, reads, epilogue::NothingLoaded{}).load();
#pragma unroll 1
    for (int part = 0; part < kNumParts; ++part) {
      typename Tile<kWhole>::Reads own = reads;
      // Also where this part is skipped: the next one may be the first of another block of 64 rows.
      if (part + 1 < kNumParts && is_used(part + 1)) {  // mutant: the_next_blocks_reads
        tile<Tile<kWhole>>(part + 1, reads, epilogue::NothingLoaded{}).load();
      }
      if (!is_used(part)) continue;
      float gate[4 * kPart], up[4 * kPart];
      const auto visit = [&](auto copy) {
        visit_part(part, [&](auto i) {
#pragma unroll
          for (int v = 0; v < 4 * kPart; ++v) {
            constexpr int kFirst = i.value % kBlockParts * kPart * 4;
            if (kFirst + v < kAccs) copy(i.value / kBlockParts, kFirst + v, v);  // mutant: a_turns_accumulators
          }
        });
      };
      visit([&](int block, int place, int v) {
        gate[v] = acc[block][place];
        if constexpr (F::kIsGated) up[v] = acc[block][kAccs + place];  // mutant: no_second_sum
      });
      tile<Tile<kWhole>>(part, own, epilogue::NothingLoaded{}).run(gate, up);  // mutant: the_next_turns_reads
      if constexpr (F::kStoresRows) visit([&](int block, int place, int v) { acc[block][place] = gate[v]; });
    }
  }

  // Calls f with a part's number as a constant, by one indirect branch.
  template <typename Visitor>
  static __device__ __forceinline__ void visit_part(int part, Visitor&& f) {
    static_assert(kNumParts <= 20, "each has its case");
    const auto visit = [&](auto i) {
      if constexpr (i.value < kNumParts) f(i);
    };
    switch (part) {
#define TCGEMM_CASE(i) \
  case i: return visit(std::integral_constant<int, i>{});
      TCGEMM_CASE(0)
      TCGEMM_CASE(1)
      TCGEMM_CASE(2)
      TCGEMM_CASE(3)
      TCGEMM_CASE(4)
      TCGEMM_CASE(5)
      TCGEMM_CASE(6)
      TCGEMM_CASE(7)
      TCGEMM_CASE(8)
      TCGEMM_CASE(9)
      TCGEMM_CASE(10)
      TCGEMM_CASE(11)
      TCGEMM_CASE(12)
      TCGEMM_CASE(13)
      TCGEMM_CASE(14)
      TCGEMM_CASE(15)
      TCGEMM_CASE(16)
      TCGEMM_CASE(17)
      TCGEMM_CASE(18)
      TCGEMM_CASE(19)
#undef TCGEMM_CASE
    }
  }

  const epilogue::FunctionParams& params_;
  const epilogue::MatrixIndex batch_;
  const int lane_;
  const int32_t line_, across_;
  bool is_whole_;
  Vectors vectors_;
  typename PartTile::Reads reads_[kUnrolled ? kNumParts : 1];
};

// Epilogue function of a consumer warpgroup's tile; empty if the kernel has none.
template <typename T, typename Epilogue, bool = Epilogue::kIsFunction>
struct WarpgroupEpilogue {
  __device__ __forceinline__ WarpgroupEpilogue(const Epilogue&, int32_t, int32_t, int32_t) {}
};
template <typename T>
inline constexpr int kTileAccs = (T::Config::kClusterK > 1 ? T::Share::kTileN : T::Config::kTileN) / 2;
template <typename T, typename Epilogue>
struct WarpgroupEpilogue<T, Epilogue, true>
    : WarpgroupFunction<typename Epilogue::Code, T::Config::kSwapped, T::kBlocksM, kTileAccs<T>,
                        BoxedPart<T, typename Epilogue::Code>> {
  __device__ __forceinline__ WarpgroupEpilogue(const Epilogue& epilogue, int32_t m_idx, int32_t n_idx,
                                               int32_t batch_idx)
      : WarpgroupEpilogue::WarpgroupFunction(epilogue.values, m_idx, n_idx, {epilogue.values, batch_idx}) {}
};

// The left half of a warpgroup's accumulators.
template <int kBlocksM, int kHalf>
__device__ __forceinline__ void take_left(float (&left)[kBlocksM][kHalf], const float (&acc)[kBlocksM][2 * kHalf]) {
#pragma unroll
  // mutant: halves_exchanged
  for (int i = 0; i < kBlocksM * kHalf; ++i) left[i / kHalf][i % kHalf] = acc[i / kHalf][i % kHalf];
}

// Brings what the function reads of a warpgroup's tile to L2 while the product is being multiplied.
template <typename F, typename Config, int kRows>
__device__ __forceinline__ void prefetch_function(const epilogue::FunctionParams& params, int32_t m_idx, int32_t n_idx,
                                                  int32_t batch_idx) {
  constexpr bool kSwapped = Config::kSwapped;
  epilogue::FunctionPrefetch<F>{params,
                                epilogue::MatrixIndex(params, batch_idx),
                                kSwapped ? n_idx : m_idx,
                                kSwapped ? m_idx : n_idx,
                                kSwapped ? Config::kTileN : kRows,
                                kSwapped ? kRows : Config::kTileN / (F::kIsGated ? 2 : 1),
                                static_cast<int>(ptx::tid_x() % 128),
                                128}
      .run();
}

}  // namespace tcgemm::wgmma_family
