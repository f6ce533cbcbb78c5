// The end of a CTA, once all stages are consumed: accumulators go to shared memory, in place of the stages; the split-K
// accumulators of its warps and of the cluster's CTAs are added up; and D or the results of a function are stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/function.cuh"
#include "epilogue/function_prefetch.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/packed/geometry.h"
#include "kernels/packed/params.cuh"
#include "kernels/packed/work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::packed {

// Destination of a product without a function.
struct Rows {
  void* d;
  FloatType out;
  int32_t n, row_end;
  const float* scales;  // null: none
};

// Whether the columns of a block are those of two products, of gate and then of up.
template <typename Epilogue>
inline constexpr bool kIsGated = Epilogue::Code::kIsGated;
template <>
inline constexpr bool kIsGated<Bare> = false;

// Zeros in kColumns columns of each result of a function, for rows of no expert, by kThreads threads.
template <int kColumns, int kThreads>
struct ZeroRows {
  const epilogue::FunctionParams& params;
  const int32_t row, row_end, first_column;
  const int thread;

  template <int i, typename T>
  __device__ __forceinline__ void store() const {
    using Bits = elementwise::Bits<T>;
    Bits* const matrix = static_cast<Bits*>(params.results[i]);
    const int32_t count = (row_end - row) * kColumns;  // mutant: zeros_without_the_last_row
#pragma unroll 1
    for (int32_t element = thread; element < count; element += kThreads) {
      const int32_t m = row + element / kColumns, n = first_column + element % kColumns;
      if (n < params.n) matrix[int64_t{m} * params.row_lengths[i] + n] = Bits{0};
    }
  }
};

// Config::kSums is the layout of the accumulators that are added up, Config::kSumThreads the number of threads that add
// them. Each CTA of a cluster stores its share of the tile's columns; in a gated product, the same columns of gate and
// up.
template <typename Config, typename Epilogue>
class BlockSums {
 public:
  static constexpr Sums kSums = Config::kSums;
  static constexpr int kThreads = Config::kSumThreads;
  static constexpr int kSets = kIsGated<Epilogue> ? 2 : 1;

  __device__ __forceinline__ explicit BlockSums(uint32_t shared) : shared_(shared), thread_(threadIdx.x) {}

  // Brings to L2 what a function will read, by some threads, long before its accumulators are complete.
  static __device__ __forceinline__ void prefetch(const Epilogue& epilogue, const Work& work, int thread, int threads) {
    if constexpr (!std::is_same_v<Epilogue, Bare>) {
      if (Config::kGrouped && work.has_no_expert()) return;
      epilogue::FunctionPrefetch<typename Epilogue::Code, true>{
          epilogue, matrix_index(epilogue, work), work.row, first_column(work), kSums.rows, kColumns, thread, threads}
          .run();
    }
  }

  // Stores a lane's fragment of an MMA's result, 16 columns by 8 rows of D, to shared memory.
  __device__ __forceinline__ void put(int warp_k, int tile, int row_block, const float* sums) const {
    const int lane = thread_ % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_block * 8 + lane % 4 * 2 + i % 2, column = tile * 16 + lane / 4 + i / 2 * 8;
      ptx::st_shared_f32(sum_address(warp_k, row, column), sums[i]);
    }
  }

  // Sends every other CTA its share, the next rank's first, so that all CTAs receive at once.
  __device__ __forceinline__ void send(uint32_t barrier) const {
#pragma unroll 1
    for (int step = 1; step < kSums.cluster; ++step) {
      const int target = (rank() + step) % kSums.cluster;
      const uint32_t target_barrier = ptx::mapa(barrier, target);
#pragma unroll 1
      for (int vector = thread_; vector < kSums.rows * kVectors; vector += kThreads) {
        float sums[4];
        sum_over_warps(vector / kVectors, column_of(target, vector % kVectors * 4), sums);
        ptx::st_async_v4(ptx::mapa(received_address(rank(), target, vector), target), sums[0], sums[1], sums[2],
                         sums[3], target_barrier);
      }
    }
  }

  __device__ __forceinline__ void store(const Rows& rows, const Epilogue& epilogue, const Work& work) const {
    if constexpr (std::is_same_v<Epilogue, Bare>) {
      store_rows(rows, work);
    } else {
      if constexpr (Config::kGrouped) {
        // mutant: function_of_rows_of_no_expert
        if (work.has_no_expert()) return store_zeros(epilogue, work);
      }
      run_function(rows, epilogue, work);
    }
  }

 private:
  static constexpr int kVectors = kSums.columns / 4 / kSums.cluster;  // of a row, that a block of the cluster stores
  static_assert(kSums.columns / 4 % kSums.cluster == 0, "a block of the cluster stores whole vectors");
  static constexpr int kColumns = 4 * kVectors / kSets;  // of each product

  // The CTA's rank in its cluster; read at each use, which saves a register in the main loop.
  static __device__ __forceinline__ int rank() { return blockIdx.x % kSums.cluster; }

  // The first column of D that this block stores.
  static __device__ __forceinline__ int32_t first_column(const Work& work) {
    return work.column_block * (kSums.columns / kSets) + rank() * kColumns;
  }

  // Index of the function's matrix in the batch: the expert, where rows are those of experts.
  static __device__ __forceinline__ epilogue::MatrixIndex matrix_index(const epilogue::FunctionParams& params,
                                                                       const Work& work) {
    if constexpr (!Config::kGrouped) return {params, 0};
    return {0, work.expert, work.row_end};  // mutant: operands_of_the_first_expert, rows_of_the_next_expert
  }

  __device__ __forceinline__ void store_zeros(const Epilogue& epilogue, const Work& work) const {
    const int32_t row_end = min(work.row + kSums.rows, work.row_end);
    ZeroRows<kColumns, kThreads> zeros{epilogue, work.row, row_end, first_column(work), thread_};
    Epilogue::Code::store(zeros);
  }

  // Column in the tile of column `column` of the share that CTA `rank` of the cluster stores.
  static __device__ __forceinline__ int column_of(int rank, int column) {
    // mutant: up_of_another_share
    return column / kColumns * (kSums.columns / kSets) + rank * kColumns + column % kColumns;
  }

  __device__ __forceinline__ void store_rows(const Rows& rows, const Work& work) const {
    // Of many rows several vectors at a time, so that their loads do not wait for each other.
    constexpr int kTotal = kSums.rows * kVectors, kBatch = kTotal % (4 * kThreads) == 0 ? 4 : 1;
#pragma unroll 1
    for (int first = thread_; first < kTotal; first += kBatch * kThreads) {
      float values[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int vector = first + i * kThreads;
        sum_over_cluster(vector / kVectors, vector % kVectors * 4, values[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) store_vector(rows, work, first + i * kThreads, values[i]);
    }
  }

  __device__ __forceinline__ void store_vector(const Rows& rows, const Work& work, int vector,
                                               float (&values)[4]) const {
    const int row = vector / kVectors, column = vector % kVectors * 4;
    const int64_t m_idx = work.row + row;
    const int64_t n_idx = work.column_block * int64_t{kSums.columns} + column_of(rank(), column);
    if (m_idx >= rows.row_end || n_idx >= rows.n) return;
    if (rows.scales != nullptr && !work.has_no_expert()) {
      const float scale = rows.scales[m_idx];  // mutant: scales_of_other_rows
#pragma unroll
      for (float& value : values) value *= scale;
    }
    const int64_t place = m_idx * rows.n + n_idx;
    switch (rows.out) {
      case FloatType::kF16: store_vectors(values, static_cast<__half*>(rows.d) + place); break;
      case FloatType::kBF16: store_vectors(values, static_cast<__nv_bfloat16*>(rows.d) + place); break;
      case FloatType::kF32: store_vectors(values, static_cast<float*>(rows.d) + place); break;
    }
  }

  // A warp takes eight rows by up to 32 columns at a time. With few rows it takes as few columns as possible: the time
  // of code that runs once is that of fetching its instructions.
  __device__ __forceinline__ void run_function(const Rows& rows, const epilogue::FunctionParams& params,
                                               const Work& work) const {
    constexpr bool kHasFewRows = kSums.rows <= 32;
    constexpr int kMostColumns = !kHasFewRows ? 32 : Epilogue::Code::kMostNeighbors > 8 ? 16 : 8;
    constexpr int kGroups = (kColumns < kMostColumns ? kColumns : kMostColumns) / 8;
    constexpr int kParts = kColumns / (8 * kGroups);
    static_assert(kColumns % (8 * kGroups) == 0, "warps cover a share");
    const epilogue::MatrixIndex batch = matrix_index(params, work);
    const int lane = thread_ % 32;
#pragma unroll 1
    for (int part = thread_ / 32; part < kSums.rows / 8 * kParts; part += kThreads / 32) {
      const int row = part / kParts * 8, column = part % kParts * (8 * kGroups);  // mutant: a_part_twice
      const int32_t m_idx = work.row + row;
      const int32_t n_idx = first_column(work) + column;
      if (m_idx >= batch.m_end || n_idx >= params.n) continue;
      epilogue::run_on_eight_rows<typename Epilogue::Code, kGroups, !kHasFewRows>(
          params, batch, m_idx, n_idx, [&](auto, auto& acc) {
            const int own_row = row + lane / 4;
            float scale = 1;
            // mutant: scales_before_the_function
            if (rows.scales != nullptr) scale = work.row + own_row < rows.row_end ? rows.scales[work.row + own_row] : 0;
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
#pragma unroll
              for (int group = 0; group < kGroups; ++group) {
                float pair[2];
                // mutant: sums_of_another_pair
                sum_over_cluster(own_row, set * kColumns + column + 8 * group + lane % 4 * 2, pair);
                acc[set][2 * group] = pair[0] * scale;
                acc[set][2 * group + 1] = pair[1] * scale;
              }
            }
          });
    }
  }

  __device__ __forceinline__ uint32_t sum_address(int warp_k, int row, int column) const {
    return shared_ + ((warp_k * kSums.rows + row) * kSums.pitch() + column) * 4;
  }

  // Shared-memory address in CTA `receiver` of what CTA `sender` sends; a receiver has a slot for each other CTA.
  __device__ __forceinline__ uint32_t received_address(int sender, int receiver, int vector) const {
    const int place = sender - (sender > receiver);  // mutant: shares_of_one_place
    return shared_ + kSums.received_offset() + place * kSums.share_bytes() + vector * 16;
  }

  // Adds kCount neighbors in shared memory to `sums`.
  template <int kCount>
  static __device__ __forceinline__ void add(uint32_t address, float (&sums)[kCount]) {
    static_assert(kCount == 2 || kCount == 4, "a pair or a vector");
    float values[kCount];
    if constexpr (kCount == 4) {
      const float4 loaded = ptx::ld_shared_v4_f32(address);
      memcpy(values, &loaded, sizeof(values));
    } else {
      uint32_t words[2];
      ptx::ld_shared_v2_u32(words[0], words[1], address);
      memcpy(values, words, sizeof(values));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += values[i];
  }

  // Sets `sums` to kCount neighbors of a row of the CTA's tile, added up over its split-K warps.
  template <int kCount>
  __device__ __forceinline__ void sum_over_warps(int row, int column, float (&sums)[kCount]) const {
#pragma unroll
    for (float& sum : sums) sum = 0;
    // mutant: sums_of_one_warp
#pragma unroll
    for (int warp = 0; warp < kSums.warps_k; ++warp) add(sum_address(warp, row, column), sums);
  }

  // Sets `sums` to kCount neighbors of this CTA's share, added up over the cluster in the order of ranks, so that
  // results do not depend on which CTA stores them.
  template <int kCount>
  __device__ __forceinline__ void sum_over_cluster(int row, int column, float (&sums)[kCount]) const {
    float own[kCount];
    sum_over_warps(row, column_of(rank(), column), own);
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (int i = 0; i < kSums.cluster; ++i) {  // mutant: sums_of_one_block
      if (i == rank()) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) sums[j] += own[j];
      } else {
        add(received_address(i, rank(), row * kVectors + column / 4) + column % 4 * 4, sums);
      }
    }
  }

  const uint32_t shared_;
  const int thread_;
};

}  // namespace tcgemm::packed
