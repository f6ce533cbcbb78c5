// Factors of blocks of both operands, each of some rows and of 128 of K or a multiple: two of the producer's warps copy
// those of a k block to its stage, and consumers multiply its sums by them when they are promoted.
//
//   sums[m, n] += factor of A[m, k block] * factor of B[n, k block] * (A * B of the k block)[m, n]
//
// A stage has those of B's tile, then those of A's, one for every Operand::kScaledRows rows: 1, or, where tiles begin
// at such a row and blocks in memory are at least as high, as many as a thread has nothing but sums of: 64 of A, 128 of
// B, or 64 where half the columns of a gated tile are no more. A gated tile's second matrix has those of the rows that
// are its own.
#pragma once

#include <cstdint>

#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

namespace tcgemm::wgmma_family {

// A thread's part of loading those of one operand's tile: where that is gated, so many rows of each matrix in turn.
template <typename Tile, int kRowsInTurn = 0>
class FactorsOfTile {
 public:
  static constexpr int kCount = Tile::kShape.num_factors(Tile::kExtent);

  __device__ __forceinline__ void begin(const StridedFactors& from, int32_t first_row, int32_t outer, int32_t inner,
                                        int thread) {
    const int64_t matrix = outer * from.outer_stride + inner * from.inner_stride;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      int row = (thread + kFactorThreads * i) * Tile::kScaledRows;
      bool is_up = false;
      if constexpr (kRowsInTurn > 0) {
        const int rows = kRowsInTurn;        // mutant: not_gated, factors_as_if_gate_came_first
        const int turn = row / rows;         // mutant: one_too_late
        is_up = turn % 2 == 1;               // mutant: gates_factors_twice
        row = turn / 2 * rows + row % rows;  // mutant: rows_of_the_tiles
      }
      row += first_row;
      const float* const data = (is_up ? from.up_data : from.data) + matrix;  // mutant: the_first_matrixs
      is_there_[i] = row < from.num_rows;                                     // mutant: another_tiles
      rows_[i] = reinterpret_cast<const char*>(data + (is_there_[i] ? from.rows.divide(row) * from.row_stride : 0));
    }
  }

  // Those of a k block; zeros where there are no rows, or no such k block. In few instructions: two warps do it for all
  // consumers, which wait for them.
  __device__ __forceinline__ void load(uint32_t target, const StridedFactors& from, int32_t k_block, int thread) const {
    const bool is_in_k = k_block < from.end;
    const int64_t k_bytes = is_in_k ? from.k_blocks.divide(k_block) * from.k_stride * 4 : 0;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (kCount % kFactorThreads != 0 && i == kOfThread - 1 && thread + kFactorThreads * i >= kCount) break;
      ptx::cp_async_narrow<4>(target + 4 * (thread + kFactorThreads * i), rows_[i] + k_bytes, is_in_k && is_there_[i]);
    }
  }

 private:
  static constexpr int kOfThread = (kCount + kFactorThreads - 1) / kFactorThreads;

  const char* rows_[kOfThread];
  bool is_there_[kOfThread];
};

// A thread's part of loading those of tiles, one k block after the other.
template <typename T, typename Epilogue>
class FactorLoader {
 public:
  __device__ __forceinline__ FactorLoader(const Params<Epilogue>& params, uint32_t shared, const Pipeline<T>& pipeline,
                                          int thread)
      : params_(params), factors_(shared + T::kFactorOffset), pipeline_(pipeline), thread_(thread) {}

  // Goes to the first k block of a tile.
  __device__ __forceinline__ void begin(int32_t m_idx, int32_t n_idx, int32_t outer, int32_t inner,
                                        int32_t first_k_block) {
    a_.begin(params_.a_factors, m_idx, outer, inner, thread_);
    b_.begin(params_.b_factors, n_idx, outer, inner, thread_);
    k_block_ = first_k_block;
  }

  // Loads the next k block's for a stage that is free, and arrives once they are there.
  __device__ __forceinline__ void load(int stage) {
    const uint32_t target = factors_ + stage * T::kFactorBytes;
    b_.load(target, params_.b_factors, k_block_, thread_);
    a_.load(target + 4 * FactorsOfTile<typename T::B>::kCount, params_.a_factors, k_block_, thread_);
    ++k_block_;  // mutant: factors_of_the_k_block_before
    ptx::cp_async_mbarrier_arrive_noinc(pipeline_.full(stage));
  }

 private:
  const Params<Epilogue>& params_;
  const uint32_t factors_;
  const Pipeline<T> pipeline_;
  const int thread_;
  int32_t k_block_ = 0;
  // As the tile of a gated product is loaded: half of its columns of each matrix, or, of weights that are the
  // instruction's A, what a warpgroup multiplies at a time.
  static constexpr bool kSwapped = T::Config::kSwapped;
  FactorsOfTile<typename T::A, Epilogue::kIsGated && kSwapped ? 64 : 0> a_;
  FactorsOfTile<typename T::B, Epilogue::kIsGated && !kSwapped ? T::B::kExtent / 2 : 0> b_;
};

// What a consumer's thread multiplies the sums of a k block by.
template <typename T, bool kIsScaled = T::kIsScaled>
class Factors;

// Nothing.
template <typename T>
class Factors<T, false> {
 public:
  struct Held {
    static constexpr bool kReadsStage = false;

    template <int kBlocks, int kColumnSums, int kSums>
    __device__ __forceinline__ void add(float (&sums)[T::kBlocksM][kSums], const float (&acc)[kBlocks][kColumnSums],
                                        int first_block, int first_column) const {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        // mutant: not_added, no_promotion
        for (int i = 0; i < kColumnSums; ++i) sums[first_block + block][first_column / 2 + i] += acc[block][i];
      }
    }
  };

  __device__ __forceinline__ Factors(uint32_t, int32_t, int) {}
  __device__ __forceinline__ void go_to(int) {}
  template <int kBlocks, int kColumns>
  __device__ __forceinline__ Held load(int, int) const {
    return {};
  }
};

template <typename T>
class Factors<T, true> {
  static constexpr int kRowsOfFactor = T::A::kScaledRows, kColumnsOfFactor = T::B::kScaledRows;
  static constexpr int kFactorsOfB = FactorsOfTile<typename T::B>::kCount;

 public:
  // Those of 64 * kBlocks rows and kColumns columns: of the rows, and, where many columns have the same, of these; else
  // those of columns are read as they are needed.
  template <int kBlocks, int kColumns>
  struct Held {
    static constexpr bool kReadsStage = kColumnsOfFactor == 1;
    static constexpr int kHalves = kRowsOfFactor == 1 ? 2 : 1;
    static constexpr int kSegments = kReadsStage ? 1 : (kColumns + kColumnsOfFactor - 1) / kColumnsOfFactor;

    float products[kSegments][kBlocks][kHalves];
    uint32_t columns;  // where those of the thread's columns begin

    template <int kColumnSums, int kSums>
    __device__ __forceinline__ void add(float (&sums)[T::kBlocksM][kSums], const float (&acc)[kBlocks][kColumnSums],
                                        int first_block, int first_column) const {
#pragma unroll
      for (int i = 0; i < kColumnSums; i += 4) {
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
            // mutant: sums_of_the_first_half
            float factor = products[kReadsStage ? 0 : 2 * i / kColumnsOfFactor][block][kHalves == 2 ? j / 2 : 0];
            if constexpr (kReadsStage) factor *= of_column[j % 2];
            float& sum = sums[first_block + block][first_column / 2 + i + j];
            sum = fmaf(acc[block][i + j], factor, sum);
          }
        }
      }
    }
  };

  // `first_row`: of the consumer's in the tile.
  __device__ __forceinline__ Factors(uint32_t shared, int32_t first_row, int thread_idx)
      : factors_(shared + T::kFactorOffset) {
    const int row = kRowsOfFactor == 1 ? thread_idx / 32 * 16 + thread_idx % 32 / 4 : 0;  // mutant: not_of_the_row
    rows_ = 4 * (kFactorsOfB + (first_row + row) / kRowsOfFactor);
    columns_ = kColumnsOfFactor == 1 ? thread_idx % 4 * 2 * 4 : 0;
  }

  // To what is in a stage.
  // mutant: another_stages
  __device__ __forceinline__ void go_to(int stage) { stage_ = factors_ + stage * T::kFactorBytes; }

  // Of what lies from `block` times 64 rows and from a column on.
  template <int kBlocks, int kColumns>
  __device__ __forceinline__ Held<kBlocks, kColumns> load(int block, int column) const {
    using H = Held<kBlocks, kColumns>;
    H held;
    held.columns = stage_ + columns_ + 4 * (column / kColumnsOfFactor);  // mutant: columns_of_the_first_segment
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < H::kHalves; ++half) {
        const int row = (block + i) * 64 + half * 8;  // mutant: rows_of_the_first_half, of_the_first_eight_rows
        float of_row;
        ptx::ld_shared(of_row, stage_ + rows_ + 4 * (row / kRowsOfFactor));
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
  static_assert((kRowsOfFactor == 1 || kRowsOfFactor == 64) &&
                    (kColumnsOfFactor == 1 || kColumnsOfFactor == 64 || kColumnsOfFactor == 128),
                "a factor for each row, or for all that a thread has of 64, and likewise for columns");
  static_assert(T::Config::kTileN % kColumnsOfFactor == 0 || kColumnsOfFactor % T::Config::kTileN == 0,
                "tiles begin where factors change, or change in none");

  const uint32_t factors_;
  uint32_t rows_, columns_;  // in a stage
  uint32_t stage_ = 0;
};

}  // namespace tcgemm::wgmma_family
