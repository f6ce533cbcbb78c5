// From a consumer warpgroup's accumulators to D, without an epilogue: conversion, staging in
// shared memory as TMA's swizzle wants it, and a bulk store that the next tile's multiplications
// hide. Where D's rows are not 16-byte aligned the staged box is copied by the threads instead.
#pragma once

#include <cstdint>

#include "kernels/wgmma/traits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/numeric.cuh"

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

// The boxes a tile is staged and stored in.
template <typename Config, int kOutBytes>
struct StoreShape {
  // Columns along D's contiguous dimension in one box: as wide as the swizzle allows without
  // reaching past the tile.
  static constexpr int kAlong = Config::kSwapped ? 64 : Config::kTileN;
  static constexpr int kWidest = 128 / kOutBytes;
  static constexpr int kBoxColumns = kAlong % kWidest == 0         ? kWidest
                                     : kAlong % (kWidest / 2) == 0 ? kWidest / 2
                                                                   : kWidest / 4;
  static constexpr int kRowBytes = kBoxColumns * kOutBytes;
  static constexpr int kBoxRows = !Config::kSwapped || Config::kTileN % 64 == 0 ? 64
                                  : Config::kTileN % 32 == 0                    ? 32
                                                                                : 16;
  static_assert(!Config::kSwapped || Config::kTileN % kBoxRows == 0, "boxes must cover the tile");
  static_assert(kAlong % kBoxColumns == 0, "tile_n must be a multiple of 16");
  static_assert(kBoxRows * kRowBytes <= 8192, "a box must fit in a store buffer");
};

// The 16 bytes that start 16 - 2 * count bytes into (first, second): the last `count` 16-bit elements
// of `first`, then the beginning of `second`.
__device__ __forceinline__ uint4 shift_in(const uint4& first, const uint4& second, int count) {
  uint32_t words[9] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w, 0};
  const int skipped = 8 - count;  // elements
  if (skipped & 8) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 4];
  }
  if (skipped & 4) {
#pragma unroll
    for (int i = 0; i < 7; ++i) words[i] = words[i + 2];
  }
  if (skipped & 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = words[i + 1];
  }
  if (skipped & 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 16);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Copies a staged box to D where TMA cannot: rows of D start anywhere. A row is cut where D has
// 16-byte boundaries, so that all but eight of its 16-bit elements go in aligned 16-byte stores;
// the eight, before the first boundary and after the last one, are spread over its lanes.
template <int kRowBytes, int kBoxRows>
__device__ __forceinline__ void copy_box(const uint8_t* buffer, uint16_t* d, int64_t ldd, int32_t rows, int32_t columns,
                                         int thread_idx) {
  constexpr int kColumns = kRowBytes / 2, kPieces = kColumns / 8, kEdge = 8 / kPieces;
  static_assert(kBoxRows * kPieces % 128 == 0, "every thread takes part in every shuffle");
  const auto at = [&](int row, int column) {
    return *reinterpret_cast<const uint16_t*>(buffer + swizzle<kRowBytes>(row * kRowBytes + column * 2));
  };
  const int piece = thread_idx % kPieces;
#pragma unroll
  for (int row = thread_idx / kPieces; row < kBoxRows; row += 128 / kPieces) {
    uint16_t* target = d + row * ldd;
    // Elements of piece 0 that lie before the row: the row starts this far into 16 bytes.
    const int before = reinterpret_cast<uintptr_t>(target) / 2 % 8;
    const uint4 own = *reinterpret_cast<const uint4*>(buffer + swizzle<kRowBytes>(row * kRowBytes + piece * 16));
    uint4 previous;
    previous.x = __shfl_up_sync(~0u, own.x, 1, kPieces);
    previous.y = __shfl_up_sync(~0u, own.y, 1, kPieces);
    previous.z = __shfl_up_sync(~0u, own.z, 1, kPieces);
    previous.w = __shfl_up_sync(~0u, own.w, 1, kPieces);
    if (row >= rows) continue;
    const int column = piece * 8 - before;
    if (column >= 0 && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(target + column) = shift_in(previous, own, before);
    } else if (column >= 0) {
#pragma unroll 1
      for (int i = column; i < columns && i < column + 8; ++i) target[i] = at(row, i);
    }
    if (before > 0) {
#pragma unroll
      for (int i = 0; i < kEdge; ++i) {
        const int edge = piece * kEdge + i, edge_column = edge < 8 - before ? edge : kColumns - 8 + edge;
        if (edge_column < columns) target[edge_column] = at(row, edge_column);
      }
    }
  }
}

// The same for float32: one element a lane.
template <int kRowBytes, int kBoxRows>
__device__ __forceinline__ void copy_box(const uint8_t* buffer, float* d, int64_t ldd, int32_t rows, int32_t columns,
                                         int thread_idx) {
  constexpr int kColumns = kRowBytes / 4;
  const int column = thread_idx % kColumns;
  if (column >= columns) return;
#pragma unroll 4
  for (int row = thread_idx / kColumns; row < kBoxRows; row += 128 / kColumns) {
    if (row >= rows) break;
    d[row * ldd + column] = *reinterpret_cast<const float*>(buffer + swizzle<kRowBytes>(row * kRowBytes + column * 4));
  }
}

// Rows 64 * block .. + 63 of a warpgroup's accumulators. (m_idx, n_idx): element of D that acc's
// first one is, in the kernel's (possibly swapped) problem.
template <typename Config, typename Epilogue, int kOutBytes>
__device__ __forceinline__ void store_rows(float (&acc)[Config::kTileN / 2], const Params<Epilogue>& params,
                                           uint8_t* buffers, int& buffer_idx, int32_t m_idx, int32_t n_idx,
                                           int32_t d_batch_idx, uint32_t barrier_id) {
  using Shape = StoreShape<Config, kOutBytes>;
  constexpr int kRowBytes = Shape::kRowBytes;
  const int thread_idx = ptx::tid_x() % 128, warp = thread_idx / 32, lane = thread_idx % 32;

  // Boxes: across the tile's columns; when swapped, across its columns and, for float32 output
  // (whose 64 rows are two boxes wide), its two halves of rows.
  constexpr int kColumnsPerBox = Config::kSwapped ? Shape::kBoxRows : Shape::kBoxColumns;
  constexpr int kHalves = Config::kSwapped ? 64 / Shape::kBoxColumns : 1;
#pragma unroll
  for (int box = 0; box < Config::kTileN / kColumnsPerBox; ++box) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint8_t* buffer = buffers + buffer_idx * 8192;
      // The store issued two boxes ago, by this same thread, has read the buffer.
      if (thread_idx == 0) ptx::tma_store_wait_read<1>();
      ptx::named_barrier_sync(barrier_id, 128);

      const uint32_t base = ptx::shared_address(buffer);
      if constexpr (kOutBytes == 2) {
#pragma unroll
        for (int j = 0; j < kColumnsPerBox / 8; j += 2) {
          const int first = 4 * (box * kColumnsPerBox / 8 + j);
          uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = pack(acc[first + 2 * i], acc[first + 2 * i + 1], params.out_type);
          if constexpr (Config::kSwapped) {
            const int row = (j + lane / 16) * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
            ptx::stmatrix_x4_trans(base + swizzle<kRowBytes>(row * kRowBytes + column * 2), r[0], r[1], r[2], r[3]);
          } else {
            const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8, column = (j + lane / 16) * 8;
            ptx::stmatrix_x4(base + swizzle<kRowBytes>(row * kRowBytes + column * 2), r[0], r[1], r[2], r[3]);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kColumnsPerBox / 8; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int first = 4 * (box * kColumnsPerBox / 8 + j) + 2 * h;
            const int row = warp * 16 + h * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
            if constexpr (Config::kSwapped) {
              if (row / Shape::kBoxColumns == half) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  *reinterpret_cast<float*>(buffer + swizzle<kRowBytes>((column + i) * kRowBytes +
                                                                        row % Shape::kBoxColumns * 4)) = acc[first + i];
                }
              }
            } else {
              *reinterpret_cast<float2*>(buffer + swizzle<kRowBytes>(row * kRowBytes + column * 4)) =
                  make_float2(acc[first], acc[first + 1]);
            }
          }
        }
      }
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(barrier_id, 128);

      // Position in D as stored: `along` its contiguous dimension, `across` its rows.
      const int32_t along = Config::kSwapped ? m_idx + half * Shape::kBoxColumns : n_idx + box * kColumnsPerBox;
      const int32_t across = Config::kSwapped ? n_idx + box * kColumnsPerBox : m_idx;
      if (params.store_with_tma) {
        if (thread_idx == 0) {
          ptx::tma_store_3d(&params.d_map, buffer, along, across, d_batch_idx);
          ptx::tma_store_commit();
        }
      } else {
        const int32_t rows_d = Config::kSwapped ? params.n : params.m,
                      columns_d = Config::kSwapped ? params.m : params.n;
        const int64_t offset = (static_cast<int64_t>(d_batch_idx) * rows_d + across) * params.ldd + along;
        if constexpr (kOutBytes == 2) {
          copy_box<kRowBytes, Shape::kBoxRows>(buffer, static_cast<uint16_t*>(params.d) + offset, params.ldd,
                                               rows_d - across, columns_d - along, thread_idx);
        } else {
          copy_box<kRowBytes, Shape::kBoxRows>(buffer, static_cast<float*>(params.d) + offset, params.ldd,
                                               rows_d - across, columns_d - along, thread_idx);
        }
      }
      buffer_idx ^= 1;
    }
  }
}

}  // namespace tcgemm::wgmma_family
