// From a consumer warpgroup's accumulators to D, without an epilogue: conversion, staging in
// shared memory as TMA's swizzle wants it, and a bulk store that the next tile's multiplications
// hide. Where D's rows are not 16-byte aligned the staged box is copied by the threads instead.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/wgmma/traits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/numeric.cuh"
#include "tile/unaligned.cuh"

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

// How 64 rows of a tile are staged and stored: in turns across the tile's columns, each of one box, or
// of two side by side when the problem is swapped and the 64 rows are wider than the swizzle (float32).
template <typename Config, int kOutBytes>
struct StoreShape {
  // Columns along D's contiguous dimension: as many as the swizzle allows without reaching past the tile.
  static constexpr int kAlong = Config::kSwapped ? 64 : Config::kTileN;
  static constexpr int kWidest = 128 / kOutBytes;
  static constexpr int kBoxColumns = kAlong >= kWidest ? kWidest : kAlong >= kWidest / 2 ? kWidest / 2 : kWidest / 4;
  static constexpr int kRowBytes = kBoxColumns * kOutBytes;
  static constexpr int kBoxes = Config::kSwapped ? 64 / kBoxColumns : 1;
  static constexpr int kMostRows = 64 / kBoxes;
  static constexpr int kBoxRows = Config::kSwapped && Config::kTileN < kMostRows ? Config::kTileN : kMostRows;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  // Elements between the boundaries at which unaligned rows are cut: 32 bytes where there is a next turn
  // along them, else 16.
  static constexpr int kCut = kOutBytes == 2 && !Config::kSwapped && kBoxColumns >= 16 ? 16 : 8;

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
  static_assert(kBoxColumns <= kAlong && kBoxes * kBoxBytes <= 8192, "a turn must fit in a store buffer");
};

// The buffer of the box to the left of another one, whose columns start `distance` further on; null
// where there is none.
struct LeftBox {
  const uint8_t* buffer = nullptr;
  int distance = 0;
};

// Copies a staged box to D where TMA cannot: rows of D start anywhere. A row is cut where D has
// boundaries of kCut elements and goes in aligned 16-byte stores, the elements before the box's first
// boundary with the box to its left. Only a tile's own edges, kCut elements of a row, go one by one,
// spread over its lanes. Boundaries of 32 bytes are worth a wait for the next box: L2 keeps sectors of
// that size, and one that is written in parts costs several times as much.
template <int kRowBytes, int kBoxRows, int kCut = 8>
__device__ __forceinline__ void copy_box(const uint8_t* buffer, LeftBox left, bool is_last, uint16_t* d, int64_t ldd,
                                         int32_t rows, int32_t columns, int thread_idx) {
  constexpr int kColumns = kRowBytes / 2, kPieces = kColumns / 8, kEdge = kCut / kPieces;
  const auto at = [&](int row, int column) {
    const uint8_t* from = column < 0 ? left.buffer : buffer;
    if (column < 0) column += left.distance;
    return from + swizzle<kRowBytes>(row * kRowBytes + column * 2);
  };
  const auto copy_element = [&](uint16_t* target, int row, int column) {
    if (column < columns) target[column] = *reinterpret_cast<const uint16_t*>(at(row, column));
  };
  const bool has_left = left.buffer != nullptr;
  const int piece = thread_idx % kPieces;
#pragma unroll 2
  for (int row = thread_idx / kPieces; row < kBoxRows; row += 128 / kPieces) {
    if (row >= rows) break;
    uint16_t* target = d + row * ldd;
    const int before = reinterpret_cast<uintptr_t>(target) / 2 % kCut;  // elements since the last boundary
    const int column = piece * 8 - before;
    if (has_left || before == 0 || piece >= kCut / 8) {
      if (column + 8 <= columns) {
        // The two pieces of staged columns that these eight lie in.
        const int skipped = -before & 7, piece_column = column - skipped;
        const uint4 low = *reinterpret_cast<const uint4*>(at(row, piece_column));
        const uint4 high = *reinterpret_cast<const uint4*>(at(row, piece_column + (skipped > 0 ? 8 : 0)));
        *reinterpret_cast<uint4*>(target + column) = skip_bytes(low, high, 2 * skipped);
      } else {
#pragma unroll 1
        for (int i = column; i < columns; ++i) copy_element(target, row, i);
      }
    }
    if (before > 0 && (!has_left || is_last)) {
#pragma unroll
      for (int i = 0; i < kEdge; ++i) {
        const int edge = piece * kEdge + i;
        const bool is_head = edge < kCut - before;
        if (is_head ? !has_left : is_last) copy_element(target, row, is_head ? edge : kColumns - kCut + edge);
      }
    }
  }
}

// The same for float32: one element a lane.
template <int kRowBytes, int kBoxRows, int kCut = 8>
__device__ __forceinline__ void copy_box(const uint8_t* buffer, LeftBox left, bool is_last, float* d, int64_t ldd,
                                         int32_t rows, int32_t columns, int thread_idx) {
  constexpr int kColumns = kRowBytes / 4;
  const bool has_left = left.buffer != nullptr;
  const int lane = thread_idx % kColumns;
#pragma unroll 4
  for (int row = thread_idx / kColumns; row < kBoxRows; row += 128 / kColumns) {
    if (row >= rows) break;
    float* target = d + row * ldd;
    const int before = reinterpret_cast<uintptr_t>(target) / 4 % 8;  // elements since the last 32-byte boundary
    const auto copy_element = [&](const uint8_t* from, int from_column, int column) {
      if (column >= columns) return;
      target[column] = *reinterpret_cast<const float*>(from + swizzle<kRowBytes>(row * kRowBytes + from_column * 4));
    };
    const int column = lane - before;
    if (column >= 0) {
      copy_element(buffer, column, column);
    } else if (has_left) {
      copy_element(left.buffer, column + left.distance, column);
    }
    if (is_last && lane < before) copy_element(buffer, kColumns - before + lane, kColumns - before + lane);
  }
}

// Partial sums of a staged box's columns: a lane adds up one word of every fourth row, the lanes of a
// warp a quarter of the box's width. The rows read together are swizzled to different banks.
template <int kOutBytes>
__device__ __forceinline__ void sum_box(const uint8_t* buffer, FloatType type, float* sums, int32_t rows,
                                        int32_t columns, int thread_idx) {
  constexpr int kPerWord = 4 / kOutBytes;
  const int lane = thread_idx % 32, word = thread_idx / 32 * 8 + lane % 8, group = lane / 8;
  float sum[kPerWord] = {};
  // Rows that lie eight apart are swizzled alike.
  const uint8_t* first[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) first[i] = buffer + swizzle<128>((group * 2 + i) * 128 + word * 4);
  rows -= group * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t bits = 0;
    if (i / 2 * 8 + i % 2 < rows) bits = *reinterpret_cast<const uint32_t*>(first[i % 2] + i / 2 * 1024);
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

// Stages the turn that starts at column `first_column` of a warpgroup's 64 rows of accumulators. The
// accumulator pair 4 * j + 2 * h holds row warp * 16 + h * 8 + lane / 4, columns 8 * j + lane % 4 * 2, + 1.
template <typename Config, int kOutBytes>
__device__ __forceinline__ void stage(const float (&acc)[Config::kTileN / 2], uint8_t* buffer, int first_column,
                                      FloatType out_type, int thread_idx) {
  using Shape = StoreShape<Config, kOutBytes>;
  constexpr int kRowBytes = Shape::kRowBytes;
  const int warp = thread_idx / 32, lane = thread_idx % 32;
  if constexpr (kOutBytes == 2) {
    const uint32_t base = ptx::shared_address(buffer);
#pragma unroll
    for (int j = 0; j < Shape::kTurnColumns / 8; j += 2) {
      const int first = 4 * (first_column / 8 + j);
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack(acc[first + 2 * i], acc[first + 2 * i + 1], out_type);
      if constexpr (Config::kSwapped) {
        const int row = (j + lane / 16) * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
        ptx::stmatrix_x4_trans(base + swizzle<kRowBytes>(row * kRowBytes + column * 2), r[0], r[1], r[2], r[3]);
      } else {
        const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, column = (j + lane / 16) * 8;
        ptx::stmatrix_x4(base + swizzle<kRowBytes>(row * kRowBytes + column * 2), r[0], r[1], r[2], r[3]);
      }
    }
  } else if constexpr (Config::kSwapped) {
    // Row and column change places; the next eight columns lie a whole swizzle group further on.
    const int along = warp * 16 + lane / 4, across = lane % 4 * 2;
    uint8_t* box = buffer + along / Shape::kBoxColumns * Shape::kBoxBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = across + i, column = along % Shape::kBoxColumns + h * 8;
        float* target = reinterpret_cast<float*>(box + swizzle<kRowBytes>(row * kRowBytes + column * 4));
#pragma unroll
        for (int j = 0; j < Shape::kTurnColumns / 8; ++j) {
          target[j * 2 * kRowBytes] = acc[4 * (first_column / 8 + j) + 2 * h + i];
        }
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < Shape::kTurnColumns / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = 4 * (first_column / 8 + j) + 2 * h;
        const int row = warp * 16 + h * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(buffer + swizzle<kRowBytes>(row * kRowBytes + column * 4)) =
            make_float2(acc[first], acc[first + 1]);
      }
    }
  }
}

// Rows 64 * block .. + 63 of a warpgroup's accumulators. (m_idx, n_idx): element of D that acc's
// first one is, in the kernel's (possibly swapped) problem.
template <typename Config, typename Epilogue, int kOutBytes>
__device__ __forceinline__ void store_rows(float (&acc)[Config::kTileN / 2], const Params<Epilogue>& params,
                                           uint8_t* buffers, int& buffer_idx, int32_t m_idx, int32_t n_idx,
                                           int32_t d_batch_idx, uint32_t barrier_id) {
  using Shape = StoreShape<Config, kOutBytes>;
  const int thread_idx = ptx::tid_x() % 128;

  // Position in D as stored: `along` its contiguous dimension, `across` its rows.
  const int32_t along = Config::kSwapped ? m_idx : n_idx, across = Config::kSwapped ? n_idx : m_idx;
  // A block's first tile finds none of the instructions in the cache, so what runs must be short and in
  // one place: two loops, of which the second copies by the same code in each turn.
  if (params.store_with_tma) {
    // Two turns at a time, one in each buffer: their barriers and the fence take longer than what they copy.
    constexpr int kAtOnce = Shape::kTurns > 1 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < Shape::kTurns; first += kAtOnce, buffer_idx ^= 1) {
      const auto for_each_turn = [&](auto f) {
#pragma unroll
        for (int turn = first; turn < first + kAtOnce && turn < Shape::kTurns; ++turn) {
          f(turn, buffers + (buffer_idx ^ (turn - first)) * 8192);
        }
      };
      // Stores issued before, by this same thread, have read these buffers.
      if (thread_idx == 0) ptx::tma_store_wait_read<2 - kAtOnce>();
      ptx::named_barrier_sync(barrier_id, 128);
      for_each_turn([&](int turn, uint8_t* buffer) {
        stage<Config, kOutBytes>(acc, buffer, Shape::first_column(turn), params.out_type, thread_idx);
      });
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(barrier_id, 128);
      if (thread_idx == 0) {
        for_each_turn([&](int turn, uint8_t* buffer) {
#pragma unroll
          for (int box = 0; box < Shape::kBoxes; ++box) {
            ptx::tma_store_3d(&params.d_map, buffer + box * Shape::kBoxBytes, along + Shape::along(turn, box),
                              across + Shape::across(turn), d_batch_idx);
          }
        });
        ptx::tma_store_commit();
      }
    }
  } else {
    using Element = std::conditional_t<kOutBytes == 2, uint16_t, float>;
    const int32_t rows = Config::kSwapped ? params.n : params.m, columns = Config::kSwapped ? params.m : params.n;
    const int64_t offset = (static_cast<int64_t>(d_batch_idx) * rows + across) * params.ldd + along;
    Element* d = static_cast<Element*>(params.d) + offset;
#pragma unroll 1
    for (int turn = 0; turn < Shape::kTurns; ++turn, buffer_idx ^= 1) {
      uint8_t* buffer = buffers + buffer_idx * 8192;
      // Everyone has copied the turn before the last, and what the last one took from it.
      ptx::named_barrier_sync(barrier_id, 128);
#pragma unroll
      for (int i = 0; i < Shape::kTurns; ++i) {
        if (i == turn) stage<Config, kOutBytes>(acc, buffer, Shape::first_column(i), params.out_type, thread_idx);
      }
      ptx::named_barrier_sync(barrier_id, 128);
      // Turns follow each other along D's rows unless the problem is swapped.
      LeftBox left;
      if (!Config::kSwapped && turn > 0) {
        left = {buffers + (buffer_idx ^ 1) * 8192, Shape::first_column(turn) - Shape::first_column(turn - 1)};
      }
      const bool is_last = Config::kSwapped || turn == Shape::kTurns - 1;
#pragma unroll 1
      for (int box = 0; box < Shape::kBoxes; ++box) {
        const int box_along = Shape::along(turn, box), box_across = Shape::across(turn);
        copy_box<Shape::kRowBytes, Shape::kBoxRows, Shape::kCut>(
            buffer + box * Shape::kBoxBytes, left, is_last, d + box_across * params.ldd + box_along, params.ldd,
            rows - across - box_across, columns - along - box_along, thread_idx);
      }
    }
  }
}

// A warpgroup's accumulators, whose first element is (m_idx, n_idx) of D.
template <typename Config, typename Epilogue, int kBlocksM>
__device__ __forceinline__ void store_tile(float (&acc)[kBlocksM][Config::kTileN / 2], const Params<Epilogue>& params,
                                           uint8_t* buffers, int& buffer_idx, int32_t m_idx, int32_t n_idx,
                                           int32_t d_batch_idx, uint32_t barrier_id) {
#pragma unroll
  for (int block = 0; block < kBlocksM; ++block) {
    if (params.out_type == FloatType::kF32) {
      store_rows<Config, Epilogue, 4>(acc[block], params, buffers, buffer_idx, m_idx + block * 64, n_idx, d_batch_idx,
                                      barrier_id);
    } else {
      store_rows<Config, Epilogue, 2>(acc[block], params, buffers, buffer_idx, m_idx + block * 64, n_idx, d_batch_idx,
                                      barrier_id);
    }
  }
}

}  // namespace tcgemm::wgmma_family
