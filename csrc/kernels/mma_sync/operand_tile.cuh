// One operand of the mainloop: its tile in shared memory, the copy into it and the loads of mma
// fragments out of it.
//
// A and B look alike from here: `extent` is M or N, and an operand is K-major when its elements
// are contiguous along K (A not transposed, B transposed). A k-step is 32 bytes of K for every
// element type, so a fragment is always 8-row groups times two 16-byte halves.
//
//   operand    element  rows of the tile  fragment loads           groups hold (tile/fragment.cuh)
//   K-major    any      extent            ldmatrix                 consecutive rows
//   otherwise  2 bytes  k                 ldmatrix.trans           consecutive rows
//   otherwise  1 byte   k                 ldmatrix.trans of pairs  pairs, bytes sorted by prmt
//   A          4 bytes  k                 64-bit loads             pairs
//   B          4 bytes  k                 32-bit loads             consecutive rows
//
// Each load fills registers in the order mma.sync takes them, so that none has to be moved.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace tcgemm::mma {

inline constexpr int kChunkBytes = 16;

enum class Role { kA, kB };

template <Role kRole, int kElementBytes, int kExtent, int kWarpExtent, int kTileKBytes, bool kKMajor, int kThreads>
struct OperandTile {
  static constexpr FragmentOrder kOrder = !kKMajor && (kElementBytes == 1 || (kElementBytes == 4 && kRole == Role::kA))
                                              ? FragmentOrder::kPairs
                                              : FragmentOrder::kConsecutive;
  static constexpr ReadPattern kPattern = kKMajor || kElementBytes == 2 ? ReadPattern::kRows8
                                          : kElementBytes == 1          ? ReadPattern::kRowPairs4
                                                                        : ReadPattern::kRows4Twice;
  static constexpr int kTileK = kTileKBytes / kElementBytes;
  static constexpr int kRows = kKMajor ? kExtent : kTileK;
  static constexpr int kRowBytes = kKMajor ? kTileKBytes : kExtent * kElementBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kGroups = kWarpExtent / 8;
  using Layout = Swizzle<kPattern, kRowBytes>;
  using Fragments = uint32_t[kGroups][2];

  // Copy: each thread moves the chunks of one column, kRowsPerPass rows apart.
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kThreads % kChunksPerRow == 0, "a pass must copy whole rows");
  static_assert(kRows % kRowsPerPass == 0, "passes must end with the tile");
  static_assert(kRowsPerPass % Layout::kPeriod == 0, "a thread's chunks must share one swizzle mask");
  static_assert(kPasses <= 32, "row predicates are one 32-bit mask");
  static_assert(kBytes % 128 == 0, "the next tile must start on a line of 32 banks");
  static_assert(kWarpExtent % 16 == 0, "a load fills two groups");

  // The part of the operand this thread copies. All counts are elements left, so that nothing
  // overflows near the largest K.
  struct Source {
    const char* pointer;   // first chunk of the next tile
    int64_t pass_bytes;    // from one chunk of this thread to the next
    int64_t tile_bytes;    // from one tile to the next along K
    uint32_t destination;  // first chunk in stage 0
    int k_offset;          // of the first chunk inside the tile
    int extent_left;       // contiguous elements from the first chunk to the edge; not K-major only
    uint32_t row_mask;     // bit i: row of pass i is inside the matrix; K-major only
    int granularity;       // largest copy that address, strides and extents allow, in bytes
  };

  // `matrix` is the batch entry, `ld` its leading dimension in bytes; `first` and `k_begin` are the
  // origin of the first tile, and the matrix ends at `extent`.
  static __device__ __forceinline__ Source make_source(const char* matrix, int64_t ld, int64_t first, int64_t k_begin,
                                                       int64_t extent, int granularity, uint32_t tile_address) {
    const int row = threadIdx.x / kChunksPerRow;
    const int chunk = threadIdx.x % kChunksPerRow;
    Source source;
    const int64_t row_idx = row + (kKMajor ? first : k_begin);
    const int64_t column_idx = chunk * kChunkElements + (kKMajor ? k_begin : first);
    source.pointer = matrix + row_idx * ld + column_idx * kElementBytes;
    source.pass_bytes = kRowsPerPass * ld;
    source.tile_bytes = kKMajor ? kTileKBytes : kTileK * ld;
    source.destination = tile_address + Layout::offset(row, chunk);
    source.granularity = granularity;
    source.k_offset = kKMajor ? chunk * kChunkElements : row;
    const int left = static_cast<int>(extent < first + kExtent ? extent - first : kExtent);
    source.extent_left = left - chunk * kChunkElements;
    source.row_mask = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (row + pass * kRowsPerPass < left) source.row_mask |= 1u << pass;
    }
    return source;
  }

  static __device__ __forceinline__ void advance(Source& source) { source.pointer += source.tile_bytes; }

  // Whether chunk `pass` begins inside the matrix; `k_left` counts from the start of the tile.
  static __device__ __forceinline__ bool is_inside(const Source& source, int pass, int k_left) {
    if (kKMajor) return source.k_offset < k_left && (source.row_mask >> pass & 1u) != 0;
    return source.extent_left > 0 && source.k_offset + pass * kRowsPerPass < k_left;
  }

  // Passes [kFirst, kLast) of an operand whose granularity is a whole chunk. What lies outside
  // becomes zero. Without a branch, so that the copies blend into the mma sequence.
  template <int kFirst, int kLast>
  static __device__ __forceinline__ void copy_wide(const Source& source, uint32_t stage_offset, int k_left) {
    const bool enabled = source.granularity == kChunkBytes;
#pragma unroll
    for (int pass = kFirst; pass < kLast; ++pass) {
      ptx::cp_async_16(enabled, source.destination + stage_offset + pass * kRowsPerPass * kRowBytes,
                       source.pointer + pass * source.pass_bytes, is_inside(source, pass, k_left));
    }
  }

  // The whole tile, when the granularity is less. Rolled: it is the rare path and must stay small.
  static __device__ __forceinline__ void copy_narrow(const Source& source, uint32_t stage_offset, int k_left) {
    if (source.granularity == kChunkBytes) return;
    uint32_t destination = source.destination + stage_offset;
    const char* pointer = source.pointer;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int left = kKMajor ? k_left - source.k_offset : source.extent_left;
      copy_chunk(destination, pointer, is_inside(source, pass, k_left) ? left : 0, source.granularity);
      destination += kRowsPerPass * kRowBytes;
      pointer += source.pass_bytes;
    }
  }

  // Byte offset in the tile from which this lane loads; `warp_first` is the warp's first row.
  static __device__ __forceinline__ uint32_t lane_offset(int warp_first) {
    const int lane = threadIdx.x % 32;
    const int warp_chunk = warp_first * kElementBytes / kChunkBytes;
    const int matrix = lane / 8;  // of the four that ldmatrix loads, and the row in it
    const int row = lane % 8;
    const int group = kRole == Role::kA ? matrix % 2 : matrix / 2;
    const int half = kRole == Role::kA ? matrix / 2 : matrix % 2;
    if constexpr (kKMajor) {
      return Layout::offset(warp_first + group * 8 + row, half);
    } else if constexpr (kElementBytes == 2) {
      return Layout::offset(half * 8 + row, warp_chunk + group);
    } else if constexpr (kElementBytes == 1) {
      return Layout::offset(matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2, warp_chunk);
    } else {
      const int byte = lane / 4 * (kRole == Role::kA ? 8 : 4);
      return Layout::offset(lane % 4, warp_chunk + byte / kChunkBytes) + byte % kChunkBytes;
    }
  }

  // Loads k-step `kStep`; `address` is the tile's address plus lane_offset(). Index arithmetic is
  // an XOR where it moves along swizzled chunks, an immediate where it moves along rows.
  template <int kStep>
  static __device__ __forceinline__ void load(Fragments& fragments, uint32_t address) {
    uint32_t r[4];
    if constexpr (kKMajor) {
      const uint32_t step_address = address ^ (kStep * 2 * kChunkBytes);
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix_x4(r, step_address + group * 8 * kRowBytes);
        assign_matrices(fragments, group, r);
      }
    } else if constexpr (kElementBytes == 2) {
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix_x4_trans(r, (address ^ (group * kChunkBytes)) + kStep * 16 * kRowBytes);
        assign_matrices(fragments, group, r);
      }
    } else if constexpr (kElementBytes == 1) {
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix_x4_trans(r, (address ^ (group / 2 * kChunkBytes)) + kStep * 32 * kRowBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // A register holds two adjacent rows at two adjacent k: keep one row of four k.
          fragments[group][half] = __byte_perm(r[half * 2], r[half * 2 + 1], 0x6420);
          fragments[group + 1][half] = __byte_perm(r[half * 2], r[half * 2 + 1], 0x7531);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_offset = (kStep * 8 + half * 4) * kRowBytes;
#pragma unroll
        for (int group = 0; group < kGroups; group += 2) {
          // 8 rows are 32 bytes.
          const uint32_t group_address = (address ^ (group * 32)) + row_offset;
          if constexpr (kRole == Role::kA) {
            ptx::ld_shared_v2_u32(fragments[group][half], fragments[group + 1][half], group_address);
          } else {
            fragments[group][half] = ptx::ld_shared_u32(group_address);
            fragments[group + 1][half] = ptx::ld_shared_u32((address ^ ((group + 1) * 32)) + row_offset);
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void assign_matrices(Fragments& fragments, int group, const uint32_t (&r)[4]) {
    fragments[group][0] = r[0];
    fragments[group][1] = r[kRole == Role::kA ? 2 : 1];
    fragments[group + 1][0] = r[kRole == Role::kA ? 1 : 2];
    fragments[group + 1][1] = r[3];
  }

  // One chunk of which the first `valid` elements are inside the matrix, in pieces of `granularity`
  // bytes: a piece is inside or outside as a whole, since the granularity divides the extents.
  static __device__ __forceinline__ void copy_chunk(uint32_t destination, const char* pointer, int valid,
                                                    int granularity) {
    const auto is_valid = [valid](int byte) { return byte / kElementBytes < valid; };
    if (granularity == 8) {
#pragma unroll
      for (int byte = 0; byte < kChunkBytes; byte += 8) {
        ptx::cp_async_narrow<8>(destination + byte, pointer + byte, is_valid(byte));
      }
    } else if (kElementBytes == 4 || granularity == 4) {
#pragma unroll
      for (int byte = 0; byte < kChunkBytes; byte += 4) {
        ptx::cp_async_narrow<4>(destination + byte, pointer + byte, is_valid(byte));
      }
    } else {
      // cp.async cannot copy less than 4 bytes.
      using Bits = std::conditional_t<kElementBytes == 1, uint8_t, uint16_t>;
      uint32_t words[4] = {};
#pragma unroll
      for (int byte = 0; byte < kChunkBytes; byte += kElementBytes) {
        const uint32_t bits = is_valid(byte) ? *reinterpret_cast<const Bits*>(pointer + byte) : 0u;
        words[byte / 4] |= bits << byte % 4 * 8;
      }
      ptx::st_shared_v4_u32(destination, words);
    }
  }
};

}  // namespace tcgemm::mma
