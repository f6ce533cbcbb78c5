// The 8-bit values of an array and of its transpose, with scales of blocks or with given ones
// (core/quantize_problem.h), from one reading of it. Bound by memory.
//
// A block has a tile of 128 x 128 elements, each of its threads 8 x 8 of them in registers: 8 neighbors of 8
// neighboring rows, of which 16 threads have all columns. So a row's largest magnitude is found by shuffles, and a
// column's by one of them and, of the block's 8 warps, through shared memory. Both results are computed from
// the registers; that of the transpose has 8 bytes of each column, which lie side by side in its row.
//
// Shared memory: largest magnitudes of columns [warp][column], then scales of columns, then the transposed tile of 128
// rows of 128 bytes. In these chunks of 8 bytes are permuted, chunk ^ column / 8, so that neither the threads of a
// half-warp that write, whose columns are 8 apart, nor those that read meet in a bank.
//
// Limits: 8-bit floats need the conversions of sm_89.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/quantize/numbers.cuh"
#include "kernels/quantize/params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

namespace tcgemm::quantize {

template <typename X, typename Q, Scales kScales, bool kTransposed, bool kAligned>
class Tile {
 public:
  static constexpr int kColumnThreads = kBlock / kVector;  // that have a row together
  static constexpr int kWarps = kThreads / 32;
  static_assert(kThreads == kColumnThreads * kBlock / kVector, "threads have squares");

  __device__ __forceinline__ Tile(const Params& params, uint32_t shared)
      : params_(params),
        shared_(shared),
        column_group_(threadIdx.x % kColumnThreads),
        row_group_(threadIdx.x / kColumnThreads) {
    const int32_t row_block = blockIdx.x / params.tile_columns;
    column_block_ = blockIdx.x - row_block * params.tile_columns;
    batch_ = row_block / params.tile_rows;
    row_block_ = row_block - batch_ * params.tile_rows;
  }

  __device__ __forceinline__ void run() {
    const auto* x = static_cast<const X*>(params_.x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x_[i].load(x + place(i), columns_left(i));
    if constexpr (kScales == Scales::kLines) {
      if constexpr (kTransposed) put_column_maxima();
      store_lines();
      if constexpr (kTransposed) {
        __syncthreads();  // mutant: maxima_not_awaited
        set_column_scales();
        __syncthreads();  // mutant: scales_not_awaited
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 four = ptx::ld_shared_v4_f32(shared_ + kScalesOffset + (column_group_ * kVector + half * 4) * 4);
          const float scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) put_column(half * 4 + j, inverse_of(scales[j]));
        }
      }
    } else {
      // mutant: entry_of_the_batch
      const float scale = kScales == Scales::kGiven ? params_.given[batch_] : scale_of_block();
      const float inverse = inverse_of(scale);
#pragma unroll
      for (int i = 0; i < kVector; ++i) store_row(i, inverse);
      if constexpr (kTransposed) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) put_column(j, inverse);
      }
    }
    if constexpr (kTransposed) {
      __syncthreads();  // mutant: columns_not_awaited
      store_columns();
    }
  }

 private:
  __device__ __forceinline__ int32_t row(int i) const { return row_block_ * kBlock + row_group_ * kVector + i; }
  __device__ __forceinline__ int32_t first_column() const { return column_block_ * kBlock + column_group_ * kVector; }
  __device__ __forceinline__ int64_t place(int i) const {
    return (static_cast<int64_t>(batch_) * params_.rows + row(i)) * params_.columns + first_column();
  }
  // Of this thread's columns those that there are; none where there is no such row.
  __device__ __forceinline__ int32_t columns_left(int i) const {
    return row(i) < params_.rows ? params_.columns - first_column() : 0;  // mutant: tail_of_a_row_lost
  }

  __device__ __forceinline__ void store_row(int i, float inverse) const {
    x_[i].template store<Q>(inverse, static_cast<uint8_t*>(params_.values) + place(i), columns_left(i));
  }

  // --- a scale for each row of the tile -----------------------------------------------------------

  // Of the threads that have a row together, the first ones store the scales, one each.
  __device__ __forceinline__ void store_lines() const {
    uint32_t largest[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest[i] = x_[i].largest();
#pragma unroll
    for (int lanes = 1; lanes < kColumnThreads; lanes *= 2) {  // mutant: maximum_of_half_a_row
#pragma unroll
      for (int i = 0; i < kVector; ++i) largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
    }
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float scale = scale_of<X, Q>(largest[i]);
      store_row(i, inverse_of(scale));
      if (column_group_ == i) own = scale;
    }
    if (column_group_ < kVector && row(column_group_) < params_.rows) {
      const int64_t line = static_cast<int64_t>(batch_) * params_.rows + row(column_group_);
      params_.scales[line * params_.tile_columns + column_block_] = own;
    }
  }

  // --- a scale for each of its columns ------------------------------------------------------------

  __device__ __forceinline__ void put_column_maxima() const {
    uint32_t largest[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      largest[j] = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) largest[j] = max(largest[j], x_[i].magnitude(j));
      // mutant: maximum_of_every_other_row
      largest[j] = max(largest[j], __shfl_xor_sync(~0u, largest[j], kColumnThreads));
    }
    if (threadIdx.x % 32 < kColumnThreads) {
      const uint32_t to = shared_ + (threadIdx.x / 32 * kBlock + column_group_ * kVector) * 4;
      ptx::st_shared_v4_u32(to, {largest[0], largest[1], largest[2], largest[3]});
      ptx::st_shared_v4_u32(to + 16, {largest[4], largest[5], largest[6], largest[7]});
    }
  }

  __device__ __forceinline__ void set_column_scales() const {
    if (threadIdx.x >= kBlock) return;
    const uint32_t column = threadIdx.x;
    uint32_t largest = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {  // mutant: maximum_of_too_few_warps
      largest = max(largest, ptx::ld_shared_u32(shared_ + (warp * kBlock + column) * 4));
    }
    const float scale = scale_of<X, Q>(largest);
    ptx::st_shared_f32(shared_ + kScalesOffset + column * 4, scale);
    const int32_t column_idx = column_block_ * kBlock + column;
    if (column_idx < params_.columns) {
      const int64_t line = static_cast<int64_t>(batch_) * params_.columns + column_idx;
      params_.transposed_scales[line * params_.tile_rows + row_block_] = scale;  // mutant: scales_of_columns_as_of_rows
    }
  }

  // --- one for all --------------------------------------------------------------------------------

  __device__ __forceinline__ float scale_of_block() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = max(largest, x_[i].largest());
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % 32 == 0) ptx::st_shared_f32(shared_ + threadIdx.x / 32 * 4, __uint_as_float(largest));
    __syncthreads();
#pragma unroll
    // mutant: block_of_one_warp
    for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, ptx::ld_shared_u32(shared_ + warp * 4));
    const float scale = scale_of<X, Q>(largest);
    if (threadIdx.x == 0) {
      const int64_t row = static_cast<int64_t>(batch_) * params_.tile_rows + row_block_;
      params_.scales[row * params_.tile_columns + column_block_] = scale;
      if constexpr (kTransposed) {
        const int64_t column = static_cast<int64_t>(batch_) * params_.tile_columns + column_block_;
        params_.transposed_scales[column * params_.tile_rows + row_block_] = scale;  // mutant: blocks_as_rows
      }
    }
    return scale;
  }

  // --- the transposed tile ------------------------------------------------------------------------

  // Of column j of this thread, its rows.
  __device__ __forceinline__ void put_column(int j, float inverse) const {
    float q[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) q[i] = x_[i][j] * inverse;
    const int column = column_group_ * kVector + j, chunk = row_group_ ^ column_group_;  // mutant: chunks_not_permuted
    ptx::st_shared_v2_u32(shared_ + kTileOffset + column * kBlock + chunk * 8,
                          {Format<Q>::pack(q[0], q[1], q[2], q[3]), Format<Q>::pack(q[4], q[5], q[6], q[7])});
  }

  // 16 bytes a thread, two chunks, whose order is exchanged in every other group of columns.
  __device__ __forceinline__ void store_columns() const {
    constexpr int kUnits = kBlock / 16;
    const int unit = threadIdx.x % kUnits;
    const int32_t first_row = row_block_ * kBlock + unit * 16, rows_left = params_.rows - first_row;
    if (rows_left <= 0) return;
#pragma unroll
    for (int pass = 0; pass < kBlock * kUnits / kThreads; ++pass) {
      const int column = pass * (kThreads / kUnits) + threadIdx.x / kUnits, group = column / kVector;
      const int32_t column_idx = column_block_ * kBlock + column;
      if (column_idx >= params_.columns) return;
      const uint4 x = ptx::ld_shared_v4_u32(shared_ + kTileOffset + column * kBlock + (unit ^ group / 2) * 16);
      const bool is_exchanged = group % 2 != 0;  // mutant: chunks_not_exchanged
      const uint32_t words[4] = {is_exchanged ? x.z : x.x, is_exchanged ? x.w : x.y, is_exchanged ? x.x : x.z,
                                 is_exchanged ? x.y : x.w};
      uint8_t* to = static_cast<uint8_t*>(params_.transposed_values) +
                    (static_cast<int64_t>(batch_) * params_.columns + column_idx) * params_.rows + first_row;
      if (params_.transposed_aligned) {
        ptx::st_global_v4_u32(to, words);
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i < rows_left) to[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));  // mutant: rows_beyond_the_last
        }
      }
    }
  }

  const Params& params_;
  const uint32_t shared_;
  const int column_group_, row_group_;
  int32_t column_block_, row_block_, batch_;
  Vector<X, kAligned> x_[kVector];
};

// What registers leave room for. A thread's elements take 32 of them, or 64 of float32, and twice as many where they
// are kept converted, for which three blocks have no room.
template <typename X, typename Q, Scales kScales, bool kTransposed, bool kAligned>
constexpr __device__ int blocks_per_sm() {
  if (sizeof(X) == 4) return kTransposed ? 1 : 2;
  constexpr bool kIsSmall = std::is_same_v<X, __nv_bfloat16> && !std::is_same_v<Q, int8_t> && kAligned;
  return kIsSmall && kScales != Scales::kBlocks ? 3 : 2;
}

template <typename X, typename Q, Scales kScales, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(kThreads, blocks_per_sm<X, Q, kScales, kTransposed, kAligned>())
    tile_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Tile<X, Q, kScales, kTransposed, kAligned>(params, ptx::shared_base_address(shared_memory)).run();
}

}  // namespace tcgemm::quantize
