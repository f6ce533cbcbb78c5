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
//   B          4 bytes  k                 32-bit loads             quads
//
// Each load fills registers in the order mma.sync takes them, so that none has to be moved.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/mma_sync/geometry.h"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/types.cuh"

namespace tcgemm::mma {

inline constexpr int kChunkBytes = 16;

// `MmaElement`: of what the instruction takes.
template <Role kRole, typename Operand, typename MmaElement, typename Config>
struct OperandTile {
  static constexpr int kElementBytes = sizeof(typename Operand::Element);
  static constexpr bool kKMajor = Operand::kIsKMajor;
  static constexpr OperandShape kShape{kRole, kElementBytes, Operand::kMajor};
  static constexpr FragmentOrder kOrder = kShape.order();
  static constexpr ReadPattern kPattern = kShape.pattern();
  static constexpr int kExtent = kRole == Role::kA ? Config::kTileM : Config::kTileN;
  static constexpr int kWarpExtent = kRole == Role::kA ? Config::kWarpM : Config::kWarpN;
  static constexpr int kTileK = Config::kTileKBytes / sizeof(MmaElement);
  static constexpr int kRows = kShape.rows(kExtent, kTileK);
  static constexpr int kRowBytes = kShape.row_bytes(kExtent, kTileK);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kGroups = kWarpExtent / 8;
  static constexpr int kPitch = kShape.pitch(kExtent, kTileK);
  static constexpr int kPanels = kRowBytes / kPitch;
  static constexpr int kPanelBytes = kRows * kPitch;
  using Layout = Swizzle<kPattern, kPitch>;
  using Fragments = uint32_t[kGroups][2];

  // Copy: each thread moves the chunks of one column, kRowsPerPass rows apart.
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static constexpr int kRowsPerPass = Config::kThreads / kChunksPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(Config::kThreads % kChunksPerRow == 0, "a pass must copy whole rows");
  static_assert(kRows % kRowsPerPass == 0, "passes must end with the tile");
  static_assert(kRowsPerPass % Layout::kPeriod == 0 ||
                    (kPattern == ReadPattern::kRows4Apart && Layout::kPeriod % kRowsPerPass == 0),
                "swizzle masks of a thread's chunks must differ by constants");
  static_assert(kPanelBytes % 1024 == 0, "TMA swizzles by address bits 7 to 9");
  static_assert(kWarpExtent % 16 == 0, "a load fills two groups");

  static constexpr Box kBox = kShape.box(kExtent, kTileK);
  static_assert(kBox.rows <= 256, "an extent of a box");
  static_assert(Operand::kSource == tile::Source::kRegisters && kElementBytes == sizeof(MmaElement),
                "fragments are loaded as the instruction takes them");

  // Byte offset in the tile of a 16-byte chunk.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    constexpr int kChunksPerPanelRow = kPitch / kChunkBytes;
    return chunk / kChunksPerPanelRow * kPanelBytes + Layout::offset(row, chunk % kChunksPerPanelRow);
  }

  // What this thread copies. All counts are elements left, so that nothing overflows near the
  // largest K.
  struct Source {
    const char* pointer;   // the next chunk
    int64_t pass_bytes;    // from one chunk of a tile to the next
    int64_t tile_bytes;    // from the last chunk of a tile to the first of the next
    uint32_t destination;  // first chunk in stage 0
    int k_offset;          // of the first chunk inside the tile
    int extent_left;       // from the first chunk to the edge: rows if K-major, else contiguous elements
  };

  // `matrix` is the batch entry, `ld` its leading dimension in bytes; `first` and `k_begin` are the
  // origin of the first tile, and the matrix ends at `extent`.
  static __device__ __forceinline__ Source make_source(const char* matrix, int64_t ld, int64_t first, int64_t k_begin,
                                                       int64_t extent, uint32_t tile_address) {
    const int row = threadIdx.x / kChunksPerRow;
    const int chunk = threadIdx.x % kChunksPerRow;
    Source source;
    const int64_t row_idx = row + (kKMajor ? first : k_begin);
    const int64_t column_idx = chunk * kChunkElements + (kKMajor ? k_begin : first);
    source.pointer = matrix + row_idx * ld + column_idx * kElementBytes;
    source.pass_bytes = kRowsPerPass * ld;
    source.tile_bytes = (kKMajor ? kRowBytes : kTileK * ld) - (kPasses - 1) * source.pass_bytes;
    source.destination = tile_address + offset(row, chunk);
    source.k_offset = kKMajor ? chunk * kChunkElements : row;
    const int left = static_cast<int>(extent < first + kExtent ? extent - first : kExtent);
    source.extent_left = left - (kKMajor ? row : chunk * kChunkElements);
    return source;
  }

  // Whether chunk `pass` begins inside the matrix; `k_left` counts from the start of the tile.
  static __device__ __forceinline__ bool is_inside(const Source& source, int pass, int k_left) {
    const int row = pass * kRowsPerPass;
    return source.k_offset + (kKMajor ? 0 : row) < k_left && (kKMajor ? row : 0) < source.extent_left;
  }

  // The same for all chunks of a tile, bit `pass` each.
  static __device__ __forceinline__ uint32_t inside_mask(const Source& source, int k_left) {
    uint32_t mask = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (is_inside(source, pass, k_left)) mask |= 1u << pass;
    }
    return mask;
  }

  // Where chunk `pass` goes. The mask of its row is that of the first one with some bits flipped.
  static __device__ __forceinline__ uint32_t destination(const Source& source, uint32_t stage_offset, int pass) {
    const int row = pass * kRowsPerPass;
    return (source.destination ^ (Layout::mask(row) * kChunkBytes)) + stage_offset + row * kPitch;
  }

  static __device__ __forceinline__ void advance(Source& source, int pass) {
    source.pointer += pass == kPasses - 1 ? source.tile_bytes : source.pass_bytes;
  }

  // Passes [kFirst, kLast) when chunks are aligned and lie inside or outside as a whole: bit
  // kFirstBit + pass of `inside` says which. What lies outside becomes zero.
  template <int kFirst, int kLast, int kFirstBit>
  static __device__ __forceinline__ void copy_aligned(Source& source, uint32_t stage_offset, uint32_t inside) {
#pragma unroll
    for (int pass = kFirst; pass < kLast; ++pass) {
      ptx::cp_async_16(destination(source, stage_offset, pass), source.pointer, inside & 1u << (kFirstBit + pass));
      advance(source, pass);
    }
  }

  // The whole tile, in words of `granularity` bytes. Rolled, to stay small.
  static __device__ __forceinline__ void copy_unaligned(Source& source, uint32_t stage_offset, int k_left,
                                                        int granularity) {
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int left = kKMajor ? k_left - source.k_offset : source.extent_left;
      copy_chunk(destination(source, stage_offset, pass), source.pointer, is_inside(source, pass, k_left) ? left : 0,
                 granularity);
      advance(source, pass);
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
      return offset(warp_first + group * 8 + row, half);
    } else if constexpr (kElementBytes == 2) {
      return offset(half * 8 + row, warp_chunk + group);
    } else if constexpr (kElementBytes == 1) {
      return offset(matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2, warp_chunk);
    } else {
      const int byte = fragment_row<kOrder>(0, lane / 4) * 4;
      return offset(lane % 4, warp_chunk + byte / kChunkBytes) + byte % kChunkBytes;
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
        ptx::ldmatrix_x4(r, step_address + group * 8 * kPitch);
        assign_matrices(fragments, group, r);
      }
    } else if constexpr (kElementBytes == 2) {
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix_x4_trans(r, (address ^ (group * kChunkBytes)) + kStep * 16 * kPitch);
        assign_matrices(fragments, group, r);
      }
    } else if constexpr (kElementBytes == 1) {
#pragma unroll
      for (int group = 0; group < kGroups; group += 2) {
        ptx::ldmatrix_x4_trans(r, (address ^ (group / 2 * kChunkBytes)) + kStep * 32 * kPitch);
        // Both groups mixed, one half in each pair of registers: prepare() sorts them.
        fragments[group][0] = r[0];
        fragments[group + 1][0] = r[1];
        fragments[group][1] = r[2];
        fragments[group + 1][1] = r[3];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row_offset = (kStep * 8 + half * 4) * kPitch;
        if constexpr (kOrder == FragmentOrder::kPairs) {
          // A pair of groups is 64 bytes of a row, and the mask of a row below 128.
#pragma unroll
          for (int group = 0; group < kGroups; group += 2) {
            ptx::ld_shared_v2_u32(fragments[group][half], fragments[group + 1][half],
                                  (address ^ (group % 4 * 32)) + group / 4 * 128 + row_offset);
          }
        } else {
          // Four groups are the chunks of a panel; rows 4 to 7 differ from 0 to 3 by one bit of the mask.
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            fragments[group][half] = ptx::ld_shared_u32((address ^ (group % 4 + half * 4) * kChunkBytes) +
                                                        group / 4 * kPanelBytes + row_offset);
          }
        }
      }
    }
  }

  // Makes groups `group` and `group` + 1 what mma.sync takes. Apart from load(), so that it can be
  // issued once the loads have arrived.
  static __device__ __forceinline__ void prepare(Fragments& fragments, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t& first = fragments[group][half];
      uint32_t& second = fragments[group + 1][half];
      if constexpr (std::is_same_v<MmaElement, ptx::TF32>) {
        first = round_to_tf32(first);
        second = round_to_tf32(second);
      } else if constexpr (kElementBytes == 1 && !kKMajor) {
        // A register holds two adjacent rows at two adjacent k: keep one row of four k.
        const uint32_t even = __byte_perm(first, second, 0x6420);
        second = __byte_perm(first, second, 0x7531);
        first = even;
      }
    }
  }

 private:
  static_assert(kElementBytes != 4 || kWarpExtent <= 32 || kWarpExtent % 64 == 0, "rows of a warp start on 256 bytes");

  // To nearest; ties go to even where that is one instruction, else away from zero.
  static __device__ __forceinline__ uint32_t round_to_tf32(uint32_t x) {
#if __CUDA_ARCH__ >= 900
    return ptx::cvt_rn_tf32_f32(x);
#else
    return ptx::cvt_rna_tf32_f32(x);
#endif
  }

  static __device__ __forceinline__ void assign_matrices(Fragments& fragments, int group, const uint32_t (&r)[4]) {
    fragments[group][0] = r[0];
    fragments[group][1] = r[kRole == Role::kA ? 2 : 1];
    fragments[group + 1][0] = r[kRole == Role::kA ? 1 : 2];
    fragments[group + 1][1] = r[3];
  }

  // One chunk of which the first `valid` elements are inside the matrix, in words of `granularity`
  // bytes: a word is inside or outside as a whole, since the granularity divides the extents.
  static __device__ __forceinline__ void copy_chunk(uint32_t destination, const char* pointer, int valid,
                                                    int granularity) {
    const auto is_valid = [valid](int byte) { return byte / kElementBytes < valid; };
    if (granularity == kChunkBytes) {
      ptx::cp_async_16(destination, pointer, valid > 0);
    } else if (granularity == 8) {
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
