// What a block ends with, once all of its stages have been read: its sums in their place, those of its warps and of the
// cluster's blocks added up, and the rows of D that they are.
#pragma once

#include <cstdint>

#include "kernels/packed/geometry.h"
#include "kernels/packed/params.cuh"
#include "kernels/packed/work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::packed {

// Where the result lies.
struct Rows {
  void* d;
  FloatType out;
  int32_t n, row_end;
  const float* scales;  // null: none
};

// Config: kSums, what is added up, and kSumThreads, of the block, that do it.
template <typename Config>
class BlockSums {
 public:
  static constexpr Sums kSums = Config::kSums;
  static constexpr int kThreads = Config::kSumThreads;

  __device__ __forceinline__ explicit BlockSums(uint32_t shared) : shared_(shared), thread_(threadIdx.x) {}

  // Of a lane, in 16 columns and 8 rows: what the instruction that multiplied left there.
  __device__ __forceinline__ void put(int warp_k, int tile, int row_block, const float* sums) const {
    const int lane = thread_ % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_block * 8 + lane % 4 * 2 + i % 2, column = tile * 16 + lane / 4 + i / 2 * 8;
      ptx::st_shared_f32(sum_address(warp_k, row, column), sums[i]);
    }
  }

  // Each block begins with another one, so that all receive at once.
  __device__ __forceinline__ void send(uint32_t barrier) const {
#pragma unroll 1
    for (int step = 1; step < kSums.cluster; ++step) {
      const int target = (rank() + step) % kSums.cluster;
      const uint32_t target_barrier = ptx::mapa(barrier, target);
#pragma unroll 1
      for (int vector = thread_; vector < kSums.rows * kVectors; vector += kThreads) {
        const int row = vector / kVectors, column = (target * kVectors + vector % kVectors) * 4;
        const float4 sum = sum_of_warps(row, column);
        ptx::st_async_v4(ptx::mapa(received_address(rank(), vector), target), sum.x, sum.y, sum.z, sum.w,
                         target_barrier);
      }
    }
  }

  __device__ __forceinline__ void store(const Rows& rows, const Work& work) const {
#pragma unroll 1
    for (int vector = thread_; vector < kSums.rows * kVectors; vector += kThreads) {
      const int row = vector / kVectors, column = (rank() * kVectors + vector % kVectors) * 4;
      const int64_t m_idx = work.row + row, n_idx = work.column_block * int64_t{kSums.columns} + column;
      if (m_idx >= rows.row_end || n_idx >= rows.n) continue;
      const float4 sum = sum_of_cluster(vector, sum_of_warps(row, column));
      float values[4] = {sum.x, sum.y, sum.z, sum.w};
      if (rows.scales != nullptr && !work.is_of_none) {
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
  }

 private:
  static constexpr int kVectors = kSums.columns / 4 / kSums.cluster;  // of a row, that a block of the cluster stores
  static_assert(kSums.columns / 4 % kSums.cluster == 0, "a block of the cluster stores whole vectors");

  // Read anew each time, for registers are short before.
  static __device__ __forceinline__ int rank() { return blockIdx.x % kSums.cluster; }

  __device__ __forceinline__ uint32_t sum_address(int warp_k, int row, int column) const {
    return shared_ + ((warp_k * kSums.rows + row) * kSums.pitch() + column) * 4;
  }

  __device__ __forceinline__ uint32_t received_address(int rank, int vector) const {
    return shared_ + kSums.received_offset() + rank * kSums.share_bytes() + vector * 16;
  }

  // Four columns of a row, of all warps of this block.
  __device__ __forceinline__ float4 sum_of_warps(int row, int column) const {
    float4 sum = ptx::ld_shared_v4_f32(sum_address(0, row, column));
#pragma unroll
    for (int warp = 1; warp < kSums.warps_k; ++warp) {  // mutant: sums_of_one_warp
      sum = add(sum, ptx::ld_shared_v4_f32(sum_address(warp, row, column)));
    }
    return sum;
  }

  // In the order of ranks, whichever this block is.
  __device__ __forceinline__ float4 sum_of_cluster(int vector, float4 own) const {
    if constexpr (kSums.cluster == 1) return own;
    float4 sum = rank() == 0 ? own : ptx::ld_shared_v4_f32(received_address(0, vector));
#pragma unroll
    for (int i = 1; i < kSums.cluster; ++i) {  // mutant: sums_of_one_block
      sum = add(sum, i == rank() ? own : ptx::ld_shared_v4_f32(received_address(i, vector)));
    }
    return sum;
  }

  static __device__ __forceinline__ float4 add(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }

  const uint32_t shared_;
  const int thread_;
};

}  // namespace tcgemm::packed
