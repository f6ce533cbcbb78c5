// Transposition of a square tile through shared memory without bank conflicts.
//
// A tile is written row by row and read column by column, each by the lanes of a warp. Rows are padded
// to an odd number of 4-byte words (for elements under 4 bytes) or of elements, so that the 32 lanes
// of either access fall on different banks:
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#shared-memory-5-x
#pragma once

#include <cstdint>

namespace tcgemm {

// Elements of 1, 2, 4, 8 or 16 bytes, by size; what they mean does not matter. A block of 256 threads.
template <typename T>
struct TransposeTile {
  static constexpr int kTile = sizeof(T) <= 4 ? 64 : 32;
  static constexpr int kThreads = 256;
  static constexpr int kRowsAtOnce = kThreads / 32;
  static constexpr int kPadding = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  static constexpr int kStride = kTile + kPadding;
  static_assert(sizeof(T) >= 4 || (kStride * sizeof(T)) % 8 == 4, "a row must be an odd number of words");
  static_assert(sizeof(T) < 4 || kStride % 2 == 1, "a row must be an odd number of elements");

  T elements[kTile * kStride];

  // Reads rows x cols elements (each at most kTile), row r at in + r * row_stride. All threads of the
  // block take part; __syncthreads() must follow.
  __device__ __forceinline__ void load(const T* __restrict__ in, int64_t row_stride, int rows, int cols) {
    const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
    if (rows == kTile && cols == kTile) {
      T values[kTile / kRowsAtOnce][kTile / 32];
#pragma unroll
      for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kTile / 32; ++j) {
          values[i][j] = in[(warp_idx + i * kRowsAtOnce) * row_stride + lane_idx + j * 32];
        }
      }
#pragma unroll
      for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kTile / 32; ++j) {
          elements[(warp_idx + i * kRowsAtOnce) * kStride + lane_idx + j * 32] = values[i][j];
        }
      }
    } else {
      for (int row = warp_idx; row < rows; row += kRowsAtOnce) {
        for (int col = lane_idx; col < cols; col += 32) elements[row * kStride + col] = in[row * row_stride + col];
      }
    }
  }

  // Writes the tile transposed: column c of it to out + c * col_stride.
  __device__ __forceinline__ void store(T* __restrict__ out, int64_t col_stride, int rows, int cols) const {
    const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
    if (rows == kTile && cols == kTile) {
#pragma unroll
      for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kTile / 32; ++j) {
          const int col = warp_idx + i * kRowsAtOnce, row = lane_idx + j * 32;
          out[col * col_stride + row] = elements[row * kStride + col];
        }
      }
    } else {
      for (int col = warp_idx; col < cols; col += kRowsAtOnce) {
        for (int row = lane_idx; row < rows; row += 32) out[col * col_stride + row] = elements[row * kStride + col];
      }
    }
  }
};

}  // namespace tcgemm
