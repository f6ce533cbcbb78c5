// What a launch tells the kernels, and what they are compiled for.
#pragma once

#include <cstdint>

namespace tcgemm::quantize {

inline constexpr int kBlock = 128;    // elements of a row, or rows, that have one scale
inline constexpr int kThreads = 256;  // of a block of either kernel
inline constexpr int kVector = 8;     // elements of a row that a thread has side by side
inline constexpr int kHeld = 4;       // vectors of a row that a thread keeps in registers

// What a tile has one scale for.
enum class Scales : int32_t { kLines, kBlocks, kGiven };

// Offsets in a block's shared memory: largest magnitudes of columns [warp][column], scales of columns, the tile.
inline constexpr int kScalesOffset = kThreads / 32 * kBlock * 4, kTileOffset = kScalesOffset + kBlock * 4;
constexpr int shared_bytes(bool transposed) { return transposed ? kTileOffset + kBlock * kBlock : kThreads / 32 * 4; }

struct Params {
  const void* x;
  const float* given;
  void* values;
  float* scales;
  void* transposed_values;
  float* transposed_scales;
  int32_t rows, columns;  // of one entry of the batch
  int32_t tile_rows, tile_columns;
  bool transposed_aligned;  // whether rows of the transpose begin on 16 bytes
};

}  // namespace tcgemm::quantize
