// D[b,m,n] = epilogue(sum_k op(A)[b,m,k] * op(B)[b,k,n]) on CUDA cores, tiled twice.
//
// A block owns kTileM x kTileN of D and walks K in steps of kTileK: global memory -> registers ->
// shared memory -> registers. While a step is multiplied, the next one is already on its way
// from global memory into registers; two shared-memory buffers make one barrier a step enough.
// A thread owns kThreadM x kThreadN of D, so it reads kThreadM + kThreadN elements from shared
// memory for kThreadM * kThreadN multiply-adds. Layouts are in Config, alignment and strides
// are data.
//
// Shared memory, for each of two buffers: A as kTileK rows of kTileM, B as kTileK rows of kTileN,
// whatever their layouts in global memory. Inside a row, 128-byte segments are permuted (see
// swizzle), which makes every access free of bank conflicts:
//   - a 16-byte chunk of a row (operand contiguous along M or N) is stored whole;
//   - a 16-byte chunk along K is scattered over as many rows; the lanes that hold one row's
//     chunks of a 128-byte phase land in different banks;
//   - fragment reads take aligned 16-byte chunks of one row, eight lanes covering one segment.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "kernels/simt/config.h"
#include "tile/gemm_args.cuh"
#include "tile/multiply_add.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::simt {

// One thread's share of moving one operand through the pipeline: kChunks chunks of 16 bytes a
// step. "Rows" are the operand's M or N index; "outer" is the index its layout does not run along.
template <typename Config, typename T, int kTileRows, bool kAlongK>
class OperandLoader {
 public:
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kChunksAlongK = Config::kTileK / kVector;
  static constexpr int kChunksAcross = kAlongK ? kChunksAlongK : kTileRows / kVector;
  static constexpr int kOuterStep = Config::kThreads / kChunksAcross;  // from chunk to chunk of a thread
  static constexpr int kChunks = kTileRows * kChunksAlongK / Config::kThreads;
  static constexpr int kSegment = 128 / sizeof(T);  // elements all banks hold at once
  static constexpr int kRowsPerPhase = kSegment / kChunksAlongK;
  static_assert(kChunks * Config::kThreads == kTileRows * kChunksAlongK, "every thread must move as many chunks");
  static_assert(kOuterStep * kChunksAcross == Config::kThreads, "a thread's chunks must differ in one index only");
  static_assert(kTileRows % kSegment == 0, "the swizzle permutes whole 128-byte segments");
  static_assert(kRowsPerPhase % kVector == 0, "the swizzle must keep 16-byte chunks whole");

  // What to XOR a row index with at depth k, a constant for unrolled k.
  static __host__ __device__ constexpr int swizzle(int k) { return k / kVector * kRowsPerPhase; }

  __device__ __forceinline__ OperandLoader(const T* matrix, int64_t ld, bool aligned, int64_t first_row, int32_t rows,
                                           int32_t k)
      : ld_(ld), aligned_(aligned) {
    const int outer = threadIdx.x / kChunksAcross;
    const int inner = threadIdx.x % kChunksAcross * kVector;
    const int32_t rows_left = static_cast<int32_t>(rows - first_row);
    source_ = kAlongK ? matrix + (first_row + outer) * ld + inner : matrix + outer * ld + first_row + inner;
    outer_left_ = (kAlongK ? rows_left : k) - outer;
    inner_left_ = (kAlongK ? k : rows_left) - inner;
  }

  // Reads the next step into registers, zeros outside the matrix.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const T* source = source_ + i * kOuterStep * ld_;
      const int valid = i * kOuterStep < outer_left_ ? inner_left_ : 0;
      if (aligned_ && valid >= kVector) {
        const Pack pack = *reinterpret_cast<const Pack*>(source);
#pragma unroll
        for (int j = 0; j < kVector; ++j) chunks_[i][j] = pack.values[j];
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) chunks_[i][j] = j < valid ? source[j] : T{};
      }
    }
    source_ += kAlongK ? Config::kTileK : Config::kTileK * ld_;
    (kAlongK ? inner_left_ : outer_left_) -= Config::kTileK;
  }

  // Writes what fetch() read into a buffer.
  __device__ __forceinline__ void store(T* buffer) const {
    const int outer = threadIdx.x / kChunksAcross;
    const int inner = threadIdx.x % kChunksAcross * kVector;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if constexpr (kAlongK) {
        T* column = buffer + inner * kTileRows + ((outer + i * kOuterStep) ^ swizzle(inner));
#pragma unroll
        for (int j = 0; j < kVector; ++j) column[j * kTileRows] = chunks_[i][j];
      } else {
        const int k = outer + i * kOuterStep;
        Pack pack;
#pragma unroll
        for (int j = 0; j < kVector; ++j) pack.values[j] = chunks_[i][j];
        *reinterpret_cast<Pack*>(buffer + k * kTileRows + (inner ^ swizzle(k))) = pack;
      }
    }
  }

 private:
  struct alignas(16) Pack {
    T values[kVector];
  };

  const T* source_;
  int64_t ld_;
  int32_t outer_left_, inner_left_;  // extents from this thread's first chunk on; the one along K shrinks
  bool aligned_;
  T chunks_[kChunks][kVector];
};

// Reads kCount elements of a thread at depth k: chunks of 16 bytes, kLanes of them apart.
template <typename Loader, int kTileRows, int kLanes, int kCount, typename T>
__device__ __forceinline__ void read_fragment(T (&fragment)[kCount], const T* buffer, int warp_offset, int lane,
                                              int k) {
  constexpr int kVector = Loader::kVector;
  constexpr int kChunkStep = kLanes * kVector;
  static_assert((kChunkStep & (kChunkStep - 1)) == 0, "the XOR is split into a lane part and a constant part");
  struct alignas(16) Pack {
    T values[kVector];
  };
  const int mask = Loader::swizzle(k);
  const T* row = buffer + k * kTileRows + warp_offset + ((lane * kVector) ^ (mask & (kChunkStep - 1)));
#pragma unroll
  for (int i = 0; i < kCount / kVector; ++i) {
    const Pack pack = *reinterpret_cast<const Pack*>(row + ((i * kChunkStep) ^ (mask & ~(kChunkStep - 1))));
#pragma unroll
    for (int j = 0; j < kVector; ++j) fragment[i * kVector + j] = pack.values[j];
  }
}

template <typename Config, typename T, typename Outputs>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    tiled_kernel(const __grid_constant__ GemmArgs<T, Outputs> args) {
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
  constexpr int kThreadM = Config::kThreadM, kThreadN = Config::kThreadN;
  constexpr int kLanesM = 8, kLanesN = 4;
  constexpr int kWarpM = kLanesM * kThreadM, kWarpN = kLanesN * kThreadN;
  using LoaderA = OperandLoader<Config, T, kTileM, !Config::kATransposed>;
  using LoaderB = OperandLoader<Config, T, kTileN, Config::kBTransposed>;
  constexpr int kVector = LoaderA::kVector;
  static_assert((kTileM / kWarpM) * (kTileN / kWarpN) * 32 == Config::kThreads, "warps must tile the block");
  static_assert(kWarpM % LoaderA::kSegment == 0 && kWarpN % LoaderB::kSegment == 0,
                "the swizzle must not lead out of a warp's rows");
  static_assert(kThreadM % kVector == 0 && kThreadN % kVector == 0, "fragments are read in 16-byte chunks");

  __shared__ alignas(16) unsigned char shared[2 * (kTileM + kTileN) * kTileK * sizeof(T)];
  T* const shared_a = reinterpret_cast<T*>(shared);
  T* const shared_b = shared_a + 2 * kTileM * kTileK;

  const TileCoord tile = args.grid.at(blockIdx.x);
  const int64_t first_m = tile.tile_m_idx * kTileM, first_n = tile.tile_n_idx * kTileN;
  LoaderA a(args.a.at_batch(tile.batch_idx), args.a.ld, args.a_aligned, first_m, args.m, args.k);
  LoaderB b(args.b.at_batch(tile.batch_idx), args.b.ld, args.b_aligned, first_n, args.n, args.k);

  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lane_m = lane % kLanesM, lane_n = lane / kLanesM;
  const int warp_m = warp_idx % (kTileM / kWarpM) * kWarpM, warp_n = warp_idx / (kTileM / kWarpM) * kWarpN;
  const int num_steps = args.k / kTileK + (args.k % kTileK != 0);

  T acc[kThreadM][kThreadN] = {};
  if (num_steps > 0) {
    a.fetch();
    b.fetch();
    a.store(shared_a);
    b.store(shared_b);
  }
  __syncthreads();
  for (int step = 0; step < num_steps; ++step) {
    const bool more = step + 1 < num_steps;
    if (more) {
      a.fetch();
      b.fetch();
    }
    const T* step_a = shared_a + step % 2 * kTileM * kTileK;
    const T* step_b = shared_b + step % 2 * kTileN * kTileK;
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      T x[kThreadM], y[kThreadN];
      read_fragment<LoaderA, kTileM, kLanesM>(x, step_a, warp_m, lane_m, k);
      read_fragment<LoaderB, kTileN, kLanesN>(y, step_b, warp_n, lane_n, k);
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) tile::multiply_add(acc[i][j], x[i], y[j]);
      }
    }
    if (more) {
      a.store(shared_a + (step + 1) % 2 * kTileM * kTileK);
      b.store(shared_b + (step + 1) % 2 * kTileN * kTileK);
    }
    __syncthreads();
  }

  args.outputs.visit([&](const auto& output) {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
      const int64_t m_idx = first_m + warp_m + (i / kVector * kLanesM + lane_m) * kVector + i % kVector;
#pragma unroll
      for (int j = 0; j < kThreadN; j += kVector) {
        const int64_t n_idx = first_n + warp_n + (j / kVector * kLanesN + lane_n) * kVector;
        T row[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) row[v] = acc[i][j + v];
        if (m_idx < args.m && n_idx < args.n) output.store(row, tile.batch_idx, m_idx, n_idx);
      }
    }
  });
}

}  // namespace tcgemm::simt
