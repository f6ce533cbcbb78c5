// Swizzled shared-memory tiles: rows of 16-byte chunks, where the chunk index is XORed with a
// value taken from the row so that one access of a warp touches each bank once.
#pragma once

#include <cstdint>

namespace tcgemm {

// The eight 16-byte chunks that one phase of a shared-memory load reads together.
enum class ReadPattern {
  kRows8,       // one chunk of 8 consecutive rows: ldmatrix
  kRowPairs4,   // one chunk of rows 0, 1, 4, 5, 8, 9, 12, 13 (or each + 2): ldmatrix of byte pairs
  kRows4Twice,  // chunks 2 i and 2 i + 1 of 4 consecutive rows: 64-bit loads
  kRows4Apart,  // chunks i and i + 4 of 4 consecutive rows: 32-bit loads
};

// Whether rows of 64 and 128 bytes lie as TMA writes them in its swizzle modes of those widths.
constexpr bool is_tensor_swizzle(ReadPattern pattern) {
  return pattern == ReadPattern::kRows8 || pattern == ReadPattern::kRows4Apart;
}

template <ReadPattern kPattern, int kRowBytes>
struct Swizzle {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "rows of 64 bytes pair up in one line of 32 banks");
  static_assert(kRowBytes >= 128 || kPattern == ReadPattern::kRows8 || kPattern == ReadPattern::kRowPairs4,
                "two rows of a line would share banks");

  // The mask repeats after this many rows.
  static constexpr int kPeriod = kPattern == ReadPattern::kRowPairs4    ? 16
                                 : kPattern == ReadPattern::kRows4Twice ? 4
                                                                        : 8;

  __host__ __device__ static constexpr int mask(int row) {
    switch (kPattern) {
      case ReadPattern::kRows8: return kRowBytes == 64 ? row >> 1 & 3 : row & 7;
      case ReadPattern::kRowPairs4: return kRowBytes == 64 ? row >> 2 & 3 : (row & 1) | (row >> 2 & 3) << 1;
      case ReadPattern::kRows4Twice: return (row & 3) << 1;
      case ReadPattern::kRows4Apart: return row & 7;
    }
    return 0;
  }

  // Byte offset of a chunk.
  __host__ __device__ static constexpr uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ mask(row)) << 4));
  }

  // Whether the eight chunks read together, `chunk` being the first, lie in different banks.
  static constexpr bool is_conflict_free(int chunk) {
    int groups = 0;
    for (int i = 0; i < 8; ++i) {
      const int row = kPattern == ReadPattern::kRows8       ? i
                      : kPattern == ReadPattern::kRowPairs4 ? i / 2 * 4 + i % 2
                                                            : i % 4;
      const int apart = kPattern == ReadPattern::kRows4Twice ? 1 : kPattern == ReadPattern::kRows4Apart ? 4 : 0;
      groups |= 1 << (offset(row, chunk + i / 4 * apart) / 16 % 8);
    }
    return groups == 255;
  }
};

static_assert(Swizzle<ReadPattern::kRows8, 64>::is_conflict_free(1), "bank conflict");
static_assert(Swizzle<ReadPattern::kRows8, 128>::is_conflict_free(5), "bank conflict");
static_assert(Swizzle<ReadPattern::kRowPairs4, 64>::is_conflict_free(2), "bank conflict");
static_assert(Swizzle<ReadPattern::kRowPairs4, 256>::is_conflict_free(9), "bank conflict");
static_assert(Swizzle<ReadPattern::kRows4Twice, 256>::is_conflict_free(6), "bank conflict");
static_assert(Swizzle<ReadPattern::kRows4Apart, 128>::is_conflict_free(3), "bank conflict");

}  // namespace tcgemm
