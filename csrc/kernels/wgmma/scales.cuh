// Block scales of both operands, each for some rows and a multiple of 128 of K: two of the producer's warps copy the
// scales of a k block to its stage, and consumers multiply the k block's accumulators by them at promotion.
//
//   acc[m, n] += scale of A[m, k block] * scale of B[n, k block] * (A * B of the k block)[m, n]
//
// A stage holds the scales of B's tile, then those of A's, one for every Operand::kScaledRows rows. That is 1, or,
// where tiles begin at a multiple and blocks in memory are at least as high, as many as the accumulators of one thread
// span: 64 of A, 128 of B, or 64 where half a gated tile has no more columns. The second matrix of a gated tile has the
// scales of its own rows.
#pragma once

#include <cstdint>

#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

namespace tcgemm::wgmma_family {

// A thread's part of loading the block scales of one operand's tile. In a gated tile, kRowsInTurn rows of gate and up
// alternate.
template <typename Tile, int kRowsInTurn = 0>
class TileScales {
 public:
  static constexpr int kCount = Tile::kShape.num_scales(Tile::kExtent);

  __device__ __forceinline__ void begin(const StridedScales& from, int32_t first_row, int32_t outer, int32_t inner,
                                        int thread) {
    const int64_t matrix = outer * from.outer_stride + inner * from.inner_stride;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      int row = (thread + kScaleThreads * i) * Tile::kScaledRows;
      bool is_up = false;
      if constexpr (kRowsInTurn > 0) {
        const int rows = kRowsInTurn;        // mutant: not_gated, scales_as_if_gate_came_first
        const int turn = row / rows;         // mutant: one_too_late
        is_up = turn % 2 == 1;               // mutant: gates_scales_twice
        row = turn / 2 * rows + row % rows;  // mutant: rows_of_the_tiles
      }
      row += first_row;
      const float* const data = (is_up ? from.up_data : from.data) + matrix;  // mutant: the_first_matrixs
      is_there_[i] = row < from.num_rows;                                     // mutant: another_tiles
      rows_[i] = reinterpret_cast<const char*>(data + (is_there_[i] ? from.rows.divide(row) * from.row_stride : 0));
    }
  }

  // Loads the scales of a k block; zeros for rows or k blocks past the end. In few instructions: two warps do it for
  // all consumers, which wait for them.
  __device__ __forceinline__ void load(uint32_t target, const StridedScales& from, int32_t k_block, int thread) const {
    const bool is_in_k = k_block < from.end;
    const int64_t k_bytes = is_in_k ? from.k_blocks.divide(k_block) * from.k_stride * 4 : 0;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (kCount % kScaleThreads != 0 && i == kOfThread - 1 && thread + kScaleThreads * i >= kCount) break;
      ptx::cp_async_narrow<4>(target + 4 * (thread + kScaleThreads * i), rows_[i] + k_bytes, is_in_k && is_there_[i]);
    }
  }

 private:
  static constexpr int kOfThread = (kCount + kScaleThreads - 1) / kScaleThreads;

  const char* rows_[kOfThread];
  bool is_there_[kOfThread];
};

// A thread's part of loading the block scales of tiles, one k block after the other.
template <typename T, typename Epilogue>
class ScaleLoader {
 public:
  __device__ __forceinline__ ScaleLoader(const Params<Epilogue>& params, uint32_t shared, const Pipeline<T>& pipeline,
                                         int thread)
      : params_(params), scales_(shared + T::kScaleOffset), pipeline_(pipeline), thread_(thread) {}

  // Goes to the first k block of a tile.
  __device__ __forceinline__ void begin(int32_t m_idx, int32_t n_idx, int32_t outer, int32_t inner,
                                        int32_t first_k_block) {
    a_.begin(params_.a_scales, m_idx, outer, inner, thread_);
    b_.begin(params_.b_scales, n_idx, outer, inner, thread_);
    k_block_ = first_k_block;
  }

  // Loads the next k block's scales to a free stage, and arrives once they are there.
  __device__ __forceinline__ void load(int stage) {
    const uint32_t target = scales_ + stage * T::kScaleBytes;
    b_.load(target, params_.b_scales, k_block_, thread_);
    a_.load(target + 4 * TileScales<typename T::B>::kCount, params_.a_scales, k_block_, thread_);
    ++k_block_;  // mutant: scales_of_the_k_block_before
    ptx::cp_async_mbarrier_arrive_noinc(pipeline_.full(stage));
  }

 private:
  const Params<Epilogue>& params_;
  const uint32_t scales_;
  const Pipeline<T> pipeline_;
  const int thread_;
  int32_t k_block_ = 0;
  // As the tile of a gated product is loaded: half of its columns of each matrix, or, of weights that are the
  // instruction's A, what a warpgroup multiplies at a time.
  static constexpr bool kSwapped = T::Config::kSwapped;
  TileScales<typename T::A, Epilogue::kIsGated && kSwapped ? 64 : 0> a_;
  TileScales<typename T::B, Epilogue::kIsGated && !kSwapped ? T::B::kExtent / 2 : 0> b_;
};

// The block scales by which a consumer's thread multiplies the accumulators of a k block.
template <typename T, bool kIsScaled = T::kIsScaled>
class Scales;

// No block scales.
template <typename T>
class Scales<T, false> {
 public:
  struct Held {
    static constexpr bool kReadsStage = false;

    template <int kBlocks, int kPartials, int kAccs>
    __device__ __forceinline__ void promote(float (&acc)[T::kBlocksM][kAccs],
                                            const float (&partial)[kBlocks][kPartials], int first_block,
                                            int first_column) const {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        // mutant: not_added, no_promotion
        for (int i = 0; i < kPartials; ++i) acc[first_block + block][first_column / 2 + i] += partial[block][i];
      }
    }
  };

  __device__ __forceinline__ Scales(uint32_t, int32_t, int) {}
  __device__ __forceinline__ void go_to(int) {}
  template <int kBlocks, int kColumns>
  __device__ __forceinline__ Held load(int, int) const {
    return {};
  }
};

template <typename T>
class Scales<T, true> {
  static constexpr int kRowsPerScale = T::A::kScaledRows, kColumnsPerScale = T::B::kScaledRows;
  static constexpr int kNumScalesB = TileScales<typename T::B>::kCount;

 public:
  // The scales of 64 * kBlocks rows and kColumns columns. Where many columns share a scale, `products` includes it;
  // else the scales of columns are read as they are needed.
  template <int kBlocks, int kColumns>
  struct Held {
    static constexpr bool kReadsStage = kColumnsPerScale == 1;
    static constexpr int kHalves = kRowsPerScale == 1 ? 2 : 1;
    static constexpr int kSegments = kReadsStage ? 1 : (kColumns + kColumnsPerScale - 1) / kColumnsPerScale;

    float products[kSegments][kBlocks][kHalves];
    uint32_t columns;  // where the scales of the thread's columns begin

    template <int kPartials, int kAccs>
    __device__ __forceinline__ void promote(float (&acc)[T::kBlocksM][kAccs],
                                            const float (&partial)[kBlocks][kPartials], int first_block,
                                            int first_column) const {
#pragma unroll
      for (int i = 0; i < kPartials; i += 4) {
        float of_column[2] = {1, 1};
        if constexpr (kReadsStage) {
          const uint32_t address = columns + 2 * i * 4;
          uint32_t bits[2];
          ptx::ld_shared_v2_u32(bits[0], bits[1], address);
          for (int j = 0; j < 2; ++j) of_column[j] = __uint_as_float(bits[j]);
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            // mutant: accumulators_of_the_first_half
            float scale = products[kReadsStage ? 0 : 2 * i / kColumnsPerScale][block][kHalves == 2 ? j / 2 : 0];
            if constexpr (kReadsStage) scale *= of_column[j % 2];
            float& x = acc[first_block + block][first_column / 2 + i + j];
            x = fmaf(partial[block][i + j], scale, x);
          }
        }
      }
    }
  };

  // `first_row`: the consumer's first row in the tile.
  __device__ __forceinline__ Scales(uint32_t shared, int32_t first_row, int thread_idx)
      : scales_(shared + T::kScaleOffset) {
    const int row = kRowsPerScale == 1 ? thread_idx / 32 * 16 + thread_idx % 32 / 4 : 0;  // mutant: not_of_the_row
    rows_ = 4 * (kNumScalesB + (first_row + row) / kRowsPerScale);
    columns_ = kColumnsPerScale == 1 ? thread_idx % 4 * 2 * 4 : 0;
  }

  // Goes to the scales in a stage.
  // mutant: another_stages
  __device__ __forceinline__ void go_to(int stage) { stage_ = scales_ + stage * T::kScaleBytes; }

  // Loads the scales from row 64 * `block` and from `column` on.
  template <int kBlocks, int kColumns>
  __device__ __forceinline__ Held<kBlocks, kColumns> load(int block, int column) const {
    using H = Held<kBlocks, kColumns>;
    H held;
    held.columns = stage_ + columns_ + 4 * (column / kColumnsPerScale);  // mutant: columns_of_the_first_segment
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < H::kHalves; ++half) {
        const int row = (block + i) * 64 + half * 8;  // mutant: rows_of_the_first_half, of_the_first_eight_rows
        float of_row;
        ptx::ld_shared(of_row, stage_ + rows_ + 4 * (row / kRowsPerScale));
#pragma unroll
        for (int segment = 0; segment < H::kSegments; ++segment) held.products[segment][i][half] = of_row;
      }
    }
    if constexpr (!H::kReadsStage) {
#pragma unroll
      for (int segment = 0; segment < H::kSegments; ++segment) {
        float of_columns;
        ptx::ld_shared(of_columns, held.columns + 4 * segment);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          // mutant: not_of_columns
          for (int half = 0; half < H::kHalves; ++half) held.products[segment][i][half] *= of_columns;
        }
      }
    }
    return held;
  }

 private:
  static_assert(
      (kRowsPerScale == 1 || kRowsPerScale == 64) &&
          (kColumnsPerScale == 1 || kColumnsPerScale == 64 || kColumnsPerScale == 128),
      "one scale for each row, or for all 64 rows that a thread has accumulators of, and likewise for columns");
  static_assert(T::Config::kTileN % kColumnsPerScale == 0 || kColumnsPerScale % T::Config::kTileN == 0,
                "a tile begins where the scale changes, or has one scale");

  const uint32_t scales_;
  uint32_t rows_, columns_;  // in a stage
  uint32_t stage_ = 0;
};

}  // namespace tcgemm::wgmma_family
