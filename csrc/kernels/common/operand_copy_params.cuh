// What a launch tells operand_copy_kernel.cuh.
#pragma once

#include <cstdint>

#include "tile/divisor.cuh"

namespace tcgemm {

struct CopyJob {
  const void* source;
  void* target;
  int64_t rows, columns;  // of the target, columns contiguous
  int64_t source_ld, source_outer_stride, source_inner_stride;
  int64_t target_ld;      // multiple of 16 bytes; what lies past `columns` is undefined
  int64_t outer, inner;   // batch extents, packed in the target
  bool transpose;         // source holds columns x rows
  int32_t element_bytes;  // 1, 2 or 4
};

namespace operand_copy {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

// 16-byte chunks that a lane copies at most.
inline constexpr int kSteps = 4;
// Side of the square that a block transposes.
inline constexpr int kTile = 64;

// Rows of 16-byte chunks, cut into segments of equal size. A power of two of neighboring lanes takes
// a segment, at most a whole warp, so that short rows leave few lanes idle.
struct RowWalk {
  int32_t chunks, segments;  // in a row
  int32_t log2_lanes, steps;
};

// A job and what is known of it before the launch, lest every thread divides by numbers of 64 bits.
struct Part {
  CopyJob job;
  RowWalk walk;
  int64_t blocks;
  Divisor segments, rows;    // of a row, of a batch entry
  Divisor tiles_r, tiles_c;  // of a batch entry that is transposed
  Divisor inner;
};

struct Copies {
  Part parts[2];
};

}  // namespace operand_copy
}  // namespace tcgemm
