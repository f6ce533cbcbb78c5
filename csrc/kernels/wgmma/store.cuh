// From a consumer warpgroup's accumulators to D, without an epilogue: conversion, staging in
// shared memory as TMA's swizzle wants it, and a bulk store that the next tile's multiplications
// hide. Where D's rows are not 16-byte aligned the threads copy what is staged instead.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/wgmma/traits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/numeric.cuh"
#include "tile/unaligned_store.cuh"

namespace tcgemm::wgmma_family {

// Byte offset `offset` of a store buffer whose rows are kRowBytes long, as TMA's swizzle of that
// width places it.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzle(uint32_t offset) {
  return offset ^ ((offset >> 7 & (kRowBytes / 16 - 1)) << 4);
}

__device__ __forceinline__ uint32_t pack(float x, float y, FloatType type) {
  if (type == FloatType::kBF16) {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(packed);
  }
  const __half2 packed = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(packed);
}

// How 64 rows of a tile are staged and stored for TMA.
template <typename Config, int kOutBytes>
struct StoreShape {
  static constexpr StoreBox kBox = StoreBox::make(Config::kSwapped, Config::kTileN, kOutBytes);
  static constexpr int kBoxColumns = kBox.columns, kBoxRows = kBox.rows, kRowBytes = kBox.row_bytes;
  static constexpr int kBoxes = kBox.count;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  // Of the tile. The last turn ends where the tile does, and repeats columns of the one before where
  // turns do not divide the tile.
  static constexpr int kTurnColumns = Config::kSwapped ? kBoxRows : kBoxColumns;
  static constexpr int kTurns = (Config::kTileN + kTurnColumns - 1) / kTurnColumns;
  static __device__ __forceinline__ constexpr int first_column(int turn) {
    return turn < kTurns - 1 ? turn * kTurnColumns : Config::kTileN - kTurnColumns;
  }
  // Where a box lies in the tile as D stores it.
  static __device__ __forceinline__ constexpr int along(int turn, int box) {
    return Config::kSwapped ? box * kBoxColumns : first_column(turn);
  }
  static __device__ __forceinline__ constexpr int across(int turn) { return Config::kSwapped ? first_column(turn) : 0; }

  static_assert(Config::kTileN % 16 == 0, "stmatrix stores 16 columns");
  static_assert(kBoxes * kBoxBytes <= 8192, "a turn must fit in a store buffer");
};

// How they are staged for the threads to copy. Each warp's rows are 16 of D's, rings of 256 bytes, of which a turn
// leaves alone the last sector that the turn before has begun. If the problem is swapped all four warps have parts
// of each row.
template <typename Config, int kOutBytes>
struct UnalignedShape {
  static constexpr int kTileBytes = Config::kTileN * kOutBytes;
  static constexpr int kRowBytes = Config::kSwapped ? 64 * kOutBytes : 256;
  static constexpr int kTurnBytes = Config::kSwapped ? kRowBytes : kTileBytes <= 256 ? kTileBytes : 256 - 64;
  static constexpr int kMostRows = 2 * 8192 / kRowBytes;
  static constexpr int kTurnColumns = !Config::kSwapped            ? kTurnBytes / kOutBytes
                                      : Config::kTileN < kMostRows ? Config::kTileN
                                                                   : kMostRows;
  static constexpr int kTurns = (Config::kTileN + kTurnColumns - 1) / kTurnColumns;
};

// Partial sums of a staged box's columns: a lane adds up one word of every fourth row, the lanes of a
// warp a quarter of the box's width. The rows read together are swizzled to different banks.
template <int kOutBytes>
__device__ __forceinline__ void sum_box(uint32_t buffer, FloatType type, float* sums, int32_t rows, int32_t columns,
                                        int thread_idx) {
  constexpr int kPerWord = 4 / kOutBytes;
  const int lane = thread_idx % 32, word = thread_idx / 32 * 8 + lane % 8, group = lane / 8;
  float sum[kPerWord] = {};
  // Rows that lie eight apart are swizzled alike.
  uint32_t first[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) first[i] = buffer + swizzle<128>((group * 2 + i) * 128 + word * 4);
  rows -= group * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t bits = 0;
    if (i / 2 * 8 + i % 2 < rows) bits = ptx::ld_shared_u32(first[i % 2] + i / 2 * 1024);
    if constexpr (kOutBytes == 4) {
      sum[0] += __uint_as_float(bits);
    } else if (type == FloatType::kBF16) {
      sum[0] += __uint_as_float(bits << 16);
      sum[1] += __uint_as_float(bits & 0xFFFF0000u);
    } else {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits));
      sum[0] += pair.x;
      sum[1] += pair.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerWord; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 8);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
    const int column = word * kPerWord + i;
    if (group == 0 && column < columns) sums[column] = sum[i];
  }
}

// Stages kColumns columns of a warpgroup's 64 rows of accumulators, from `first_column` on. The accumulator pair
// 4 * j + 2 * h holds row warp * 16 + h * 8 + lane / 4, columns 8 * j + lane % 4 * 2, + 1. place(row, column): the
// byte of the buffer where an element goes, by its place in these columns as D has them; eight rows further on it
// lies 8 * kRowBytes further.
template <typename Config, int kOutBytes, int kColumns, int kRowBytes, typename Place>
__device__ __forceinline__ void stage_columns(const float (&acc)[Config::kTileN / 2], uint32_t buffer, int first_column,
                                              FloatType out_type, int thread_idx, Place place) {
  const int warp = thread_idx / 32, lane = thread_idx % 32;
  if constexpr (kOutBytes == 2) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      const int first = 4 * (first_column / 8 + j);
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack(acc[first + 2 * i], acc[first + 2 * i + 1], out_type);
      if constexpr (Config::kSwapped) {
        const int row = (j + lane / 16) * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
        ptx::stmatrix_x4_trans(buffer + place(row, column), r[0], r[1], r[2], r[3]);
      } else {
        const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, column = (j + lane / 16) * 8;
        ptx::stmatrix_x4(buffer + place(row, column), r[0], r[1], r[2], r[3]);
      }
    }
  } else if constexpr (Config::kSwapped) {
    // Row and column change places.
    const int along = warp * 16 + lane / 4, across = lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t target = buffer + place(across + i, along + h * 8);
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          ptx::st_shared_f32(target + j * 8 * kRowBytes, acc[4 * (first_column / 8 + j) + 2 * h + i]);
        }
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = 4 * (first_column / 8 + j) + 2 * h;
        const int row = warp * 16 + h * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
        ptx::st_shared_v2_f32(buffer + place(row, column), acc[first], acc[first + 1]);
      }
    }
  }
}

// Stages the turn that starts at column `first_column` as TMA's boxes.
template <typename Config, int kOutBytes>
__device__ __forceinline__ void stage(const float (&acc)[Config::kTileN / 2], uint32_t buffer, int first_column,
                                      FloatType out_type, int thread_idx) {
  using Shape = StoreShape<Config, kOutBytes>;
  constexpr int kRowBytes = Shape::kRowBytes;
  stage_columns<Config, kOutBytes, Shape::kTurnColumns, kRowBytes>(
      acc, buffer, first_column, out_type, thread_idx, [](int row, int column) {
        if constexpr (Shape::kBoxes == 1) return swizzle<kRowBytes>(row * kRowBytes + column * kOutBytes);
        return column / Shape::kBoxColumns * Shape::kBoxBytes +
               swizzle<kRowBytes>(row * kRowBytes + column % Shape::kBoxColumns * kOutBytes);
      });
}

// As store_rows below, where TMA cannot. (along, across): the place in D as it is stored.
template <typename Config, typename Epilogue, int kOutBytes>
__device__ __forceinline__ void store_unaligned_rows(const float (&acc)[Config::kTileN / 2],
                                                     const Params<Epilogue>& params, uint32_t buffer, int32_t along,
                                                     int32_t across, int32_t d_batch_idx, uint32_t barrier_id) {
  using Shape = UnalignedShape<Config, kOutBytes>;
  using Rows = UnalignedRows<std::conditional_t<kOutBytes == 2, uint16_t, float>, Shape::kRowBytes>;
  constexpr int kSectors = Shape::kTurnBytes / 32, kTurnColumns = Shape::kTurnColumns;
  const int thread_idx = ptx::tid_x() % 128, warp = thread_idx / 32;
  const int32_t d_rows = Config::kSwapped ? params.n : params.m, d_columns = Config::kSwapped ? params.m : params.n;
  const int64_t offset = (static_cast<int64_t>(d_batch_idx) * d_rows + across) * params.ldd + along;
  const int32_t columns = max(min(d_columns - along, Config::kSwapped ? 64 : Config::kTileN), 0);
  Rows rows{buffer, static_cast<char*>(params.d) + offset * kOutBytes, params.ldd * kOutBytes, columns * kOutBytes};
  const auto sync = [&] {
    if constexpr (Config::kSwapped) {
      ptx::named_barrier_sync(barrier_id, 128);
    } else {
      __syncwarp();
    }
  };
#pragma unroll 1
  for (int turn = 0; turn < Shape::kTurns; ++turn) {
    const int first_column = turn * kTurnColumns;
    sync();  // all have copied what they had to of the turn before
#pragma unroll
    for (int i = 0; i < Shape::kTurns; ++i) {
      constexpr int kLast = Config::kTileN - (Shape::kTurns - 1) * kTurnColumns;
      const auto place = [&](int row, int column) {
        return staged_offset<Shape::kRowBytes>(row,
                                               (Config::kSwapped ? column : column + i * kTurnColumns) * kOutBytes);
      };
      if (i != turn) continue;
      if (i < Shape::kTurns - 1) {
        stage_columns<Config, kOutBytes, kTurnColumns, Shape::kRowBytes>(acc, buffer, i * kTurnColumns, params.out_type,
                                                                         thread_idx, place);
      } else {
        stage_columns<Config, kOutBytes, kLast, Shape::kRowBytes>(acc, buffer, i * kTurnColumns, params.out_type,
                                                                  thread_idx, place);
      }
    }
    sync();
    if constexpr (Config::kSwapped) {
      const int end_row = min(min(kTurnColumns, Config::kTileN - first_column), d_rows - across - first_column);
      rows.template copy<kSectors, 4>(0, true, true, 0, warp, end_row);
      rows.d += kTurnColumns * rows.ldd;
    } else {
      const bool is_last = first_column + kTurnColumns >= columns;
      rows.template copy<kSectors, 1>(turn * kSectors, turn == 0, is_last, warp * 16, 0,
                                      min(warp * 16 + 16, d_rows - across));
      if (is_last) break;
    }
  }
}

// Rows 64 * block .. + 63 of a warpgroup's accumulators. (m_idx, n_idx): element of D that acc's
// first one is, in the kernel's (possibly swapped) problem. kTmaBuffers: those of 8 KB that there are where TMA stores.
template <typename Config, typename Epilogue, int kOutBytes, int kTmaBuffers = 2>
__device__ __forceinline__ void store_rows(float (&acc)[Config::kTileN / 2], const Params<Epilogue>& params,
                                           const tile::TensorMap& d_map, uint32_t buffers, int& buffer_idx,
                                           int32_t m_idx, int32_t n_idx, int32_t d_batch_idx, uint32_t barrier_id) {
  using Shape = StoreShape<Config, kOutBytes>;
  const int thread_idx = ptx::tid_x() % 128;

  // Position in D as stored: `along` its contiguous dimension, `across` its rows.
  const int32_t along = Config::kSwapped ? m_idx : n_idx, across = Config::kSwapped ? n_idx : m_idx;
  // A block's first tile finds none of the instructions in the cache, so what runs must be short and in
  // one place: two loops, of which the second copies by the same code in each turn.
  if (params.store_with_tma) {
    // One turn in each buffer at a time: their barriers and the fence take longer than what they copy.
    constexpr int kAtOnce = Shape::kTurns > 1 ? kTmaBuffers : 1;
#pragma unroll
    for (int first = 0; first < Shape::kTurns; first += kAtOnce, buffer_idx ^= kTmaBuffers - 1) {
      const auto for_each_turn = [&](auto f) {
#pragma unroll
        for (int turn = first; turn < first + kAtOnce && turn < Shape::kTurns; ++turn) {
          f(turn, buffers + (buffer_idx ^ (turn - first)) * 8192);
        }
      };
      // Stores issued before, by this same thread, have read these buffers.
      if (thread_idx == 0) ptx::tma_store_wait_read<kTmaBuffers - kAtOnce>();  // mutant: buffer_overwritten
      ptx::named_barrier_sync(barrier_id, 128);
      for_each_turn([&](int turn, uint32_t buffer) {
        stage<Config, kOutBytes>(acc, buffer, Shape::first_column(turn), params.out_type, thread_idx);
      });
      ptx::fence_proxy_async();  // mutant: unfenced_store
      ptx::named_barrier_sync(barrier_id, 128);
      if (thread_idx == 0) {
        for_each_turn([&](int turn, uint32_t buffer) {
#pragma unroll
          for (int box = 0; box < Shape::kBoxes; ++box) {
            ptx::tma_store_3d(&d_map, buffer + box * Shape::kBoxBytes, along + Shape::along(turn, box),
                              across + Shape::across(turn), d_batch_idx);
          }
        });
        ptx::tma_store_commit();
      }
    }
  } else {
    store_unaligned_rows<Config, Epilogue, kOutBytes>(acc, params, buffers, along, across, d_batch_idx, barrier_id);
  }
}

// A warpgroup's accumulators, whose first element is (m_idx, n_idx) of D. d_map: of boxes as Config has them.
template <typename Config, int kTmaBuffers, typename Epilogue, int kBlocksM>
__device__ __forceinline__ void store_tile(float (&acc)[kBlocksM][Config::kTileN / 2], const Params<Epilogue>& params,
                                           const tile::TensorMap& d_map, uint32_t buffers, int& buffer_idx,
                                           int32_t m_idx, int32_t n_idx, int32_t d_batch_idx, uint32_t barrier_id) {
#pragma unroll
  for (int block = 0; block < kBlocksM; ++block) {
    if (params.out_type == FloatType::kF32) {
      store_rows<Config, Epilogue, 4, kTmaBuffers>(acc[block], params, d_map, buffers, buffer_idx, m_idx + block * 64,
                                                   n_idx, d_batch_idx, barrier_id);
    } else {
      store_rows<Config, Epilogue, 2, kTmaBuffers>(acc[block], params, d_map, buffers, buffer_idx, m_idx + block * 64,
                                                   n_idx, d_batch_idx, barrier_id);
    }
  }
}

}  // namespace tcgemm::wgmma_family
