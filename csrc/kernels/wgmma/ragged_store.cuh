// From accumulators to the rows of D that a tile of tokens has: a box that lies inside the tile goes
// by TMA, the last one, which would reach into the next group's rows, in stores of its threads.
#pragma once

#include <cstdint>

#include "kernels/wgmma/ragged_traits.cuh"
#include "kernels/wgmma/store.cuh"
#include "ptx/special_registers.cuh"

namespace tcgemm::wgmma_family {

// The first `rows` rows and `columns` columns of a staged box. `aligned`: D's rows start on 16 bytes.
template <typename Out, int kRowBytes>
__device__ __forceinline__ void copy_rows(uint32_t buffer, Out* d, int64_t ldd, int32_t rows, int32_t columns,
                                          bool aligned, int thread_idx) {
  if (aligned) {
    constexpr int kChunks = kRowBytes / 16, kChunkColumns = 16 / sizeof(Out);
    const int chunk = thread_idx % kChunks;
    if (chunk * kChunkColumns >= columns) return;
    for (int row = thread_idx / kChunks; row < rows; row += 128 / kChunks) {
      *reinterpret_cast<uint4*>(d + row * ldd + chunk * kChunkColumns) =
          ptx::ld_shared_v4_u32(buffer + swizzle<kRowBytes>(row * kRowBytes + chunk * 16));
    }
  } else {
    constexpr int kColumns = kRowBytes / sizeof(Out);
    const int column = thread_idx % kColumns;
    if (column >= columns) return;
    for (int row = thread_idx / kColumns; row < rows; row += 128 / kColumns) {
      ptx::ld_shared(d[row * ldd + column], buffer + swizzle<kRowBytes>(row * kRowBytes + column * sizeof(Out)));
    }
  }
}

// 64 rows of accumulators, those of D's columns from m_idx on, one column for each token of the tile.
template <typename Out, typename Config, typename Epilogue>
__device__ __forceinline__ void store_tokens_as(float (&acc)[Config::kTileN / 2], const Params<Epilogue>& params,
                                                uint32_t buffers, int& buffer_idx, int32_t m_idx,
                                                const RaggedWork& work, uint32_t barrier_id) {
  using Shape = StoreShape<Config, sizeof(Out)>;
  const int thread_idx = ptx::tid_x() % 128;
#pragma unroll
  for (int turn = 0; turn < Shape::kTurns; ++turn, buffer_idx ^= 1) {
    const int32_t tokens = work.num_tokens() - Shape::across(turn);
    if (tokens <= 0) break;
    const uint32_t buffer = buffers + buffer_idx * 8192;
    // The stores issued two turns ago, by this same thread, have read the buffer.
    if (thread_idx == 0) ptx::tma_store_wait_read<1>();
    ptx::named_barrier_sync(barrier_id, 128);
    stage<Config, sizeof(Out)>(acc, buffer, Shape::first_column(turn), params.out_type, thread_idx);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier_id, 128);
    const bool is_whole = params.store_with_tma && tokens >= Shape::kBoxRows;
    const int32_t row = work.n_idx + Shape::across(turn);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const uint32_t staged = buffer + box * Shape::kBoxBytes;
      const int32_t column = m_idx + Shape::along(turn, box);
      if (!is_whole) {
        copy_rows<Out, Shape::kRowBytes>(staged, static_cast<Out*>(params.d) + row * params.ldd + column, params.ldd,
                                         min(tokens, Shape::kBoxRows), params.m - column, params.store_with_tma,
                                         thread_idx);
      } else if (thread_idx == 0) {
        ptx::tma_store_3d(&params.d_map, staged, column, row, 0);
      }
    }
    // Also without a store: the wait above counts groups.
    if (thread_idx == 0) ptx::tma_store_commit();
  }
}

template <typename Config, typename Epilogue>
__device__ __forceinline__ void store_tokens(float (&acc)[Config::kTileN / 2], const Params<Epilogue>& params,
                                             uint32_t buffers, int& buffer_idx, int32_t m_idx, const RaggedWork& work,
                                             uint32_t barrier_id) {
  if (params.out_type == FloatType::kF32) {
    store_tokens_as<float, Config>(acc, params, buffers, buffer_idx, m_idx, work, barrier_id);
  } else {
    store_tokens_as<uint16_t, Config>(acc, params, buffers, buffer_idx, m_idx, work, barrier_id);
  }
}

// Calls f for each block of 64 columns of D, whose accumulators acc[0] holds then, and which begins at `column`. In one
// place in the code, to which the later blocks' values move: registers have no index that changes, and where f may
// read either block's, or is there once for each, the compiler makes multiplications wait for each other.
template <int kBlocks, int kSize, typename F>
__device__ __forceinline__ void for_blocks_of_columns(float (&acc)[kBlocks][kSize], int32_t column, F&& f) {
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    f(column + block * 64);
#pragma unroll
    for (int next = 1; next < kBlocks; ++next) {
#pragma unroll
      for (int v = 0; v < kSize; ++v) acc[next - 1][v] = acc[next][v];  // mutant: the_same_block_twice
    }
  }
}

}  // namespace tcgemm::wgmma_family
