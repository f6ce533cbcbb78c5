// From staged rows to a D whose rows TMA cannot store, because they start anywhere: by the threads, in whole
// sectors of L2 where there are any. A sector that is written in parts costs several times as much.
#pragma once

#include <cstdint>

#include "ptx/global_memory.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/unaligned.cuh"

namespace tcgemm {

// Where byte `byte` of a staged row lies. Rows are rings of kRowBytes, a power of two, and eight of them together
// are swizzled: those of 128 bytes as TMA does it.
template <int kRowBytes>
__device__ __forceinline__ uint32_t staged_offset(int row, int byte) {
  return row * kRowBytes + ((byte & (kRowBytes - 1)) ^ (row & 7) << 4);
}

// Staged rows, of which byte 0 goes to `d`. Numbers are of bytes.
template <typename Element, int kRowBytes>
struct UnalignedRows {
  static constexpr int kSector = 32;
  static constexpr int kElement = sizeof(Element);

  uint32_t buffer;  // in shared memory
  char* d;
  int64_t ldd;
  int32_t width;  // of what D has of a row; 0 or more

  __device__ __forceinline__ char* target(int row) const { return d + row * ldd; }
  // From the beginning of a sector to `target`.
  static __device__ __forceinline__ int before(const char* target) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(target)) & (kSector - kElement);
  }

  // Copies the whole ones of kSectors sectors of each row, counted from the one in which the row begins. A warp
  // takes eight rows at a time from `first_row` on, 64 bytes of each. It loads what it need not store, too: a
  // branch would keep loads from being under way together.
  template <int kSectors>
  __device__ __forceinline__ void copy_sectors(int first_sector, int first_row, int row_step, int end_row) const {
    constexpr int kSteps = (kSectors + 1) / 2;
    const int lane = ptx::tid_x() % 32;
#pragma unroll 1
    for (; first_row < end_row; first_row += row_step) {
      // Rows four apart, which are swizzled to different banks, are read together.
      const int row = first_row + lane / 4 % 2 * 4 + lane / 8;
      char* const row_target = target(row);
      const int skipped = before(row_target), chunk_skipped = -skipped & (16 - kElement);
      const int first = first_sector * kSector + lane % 4 / 2 * kSector - skipped, chunk = first + lane % 2 * 16;
      uint4 bytes[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        // The two staged chunks that these 16 bytes lie in.
        const int staged = chunk - chunk_skipped + i * 2 * kSector;
        const uint4 low = ptx::ld_shared_v4_u32(buffer + staged_offset<kRowBytes>(row, staged));
        const uint4 high = ptx::ld_shared_v4_u32(buffer + staged_offset<kRowBytes>(row, staged + 16));
        bytes[i] = skip_bytes(low, high, chunk_skipped);
      }
      const int end = row < end_row ? width - kSector : -2 * kSector;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (first + i * 2 * kSector <= end && (i > 0 || first >= 0)) {
          ptx::st_global_v4_u32(row_target + chunk + i * 2 * kSector, {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w});
        }
      }
    }
  }

  enum class Edge { kHead, kTail, kBoth };

  // Copies what lies before a row's first whole sector, what lies after its last one, or both, which are a sector
  // together where whole sectors make up `width`. A lane for each element, so that a sector is written at once.
  template <Edge kEdge, int kRowStep>
  __device__ __forceinline__ void copy_edges(int first_row, int end_row) const {
    constexpr int kAtOnce = 4;
    static_assert(kAtOnce * kRowStep % 8 == 0, "rows taken at once lie alike in the swizzle");
    const int lane = ptx::tid_x() % 32, element = lane * kElement % kSector;
    first_row += lane * kElement / kSector;
    const int swizzle = (first_row & 7) << 4;
    char* row_target = target(first_row);
#pragma unroll 1
    for (; first_row < end_row; first_row += kAtOnce * kRowStep) {
      char* targets[kAtOnce];
      Element values[kAtOnce];
      bool is_wanted[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, row_target += kRowStep * ldd) {
        const int skipped = before(row_target);
        int byte = element - skipped;
        if (kEdge == Edge::kTail || (kEdge == Edge::kBoth && byte < 0)) byte += (skipped + width) & -kSector;
        const int place = (byte & (kRowBytes - 1)) ^ (swizzle ^ (i * kRowStep & 7) << 4);
        const uint32_t from = buffer + first_row * kRowBytes + i * kRowStep * kRowBytes + place;
        ptx::ld_shared(values[i], from);
        // A head of nothing is a whole sector.
        const bool is_edge = kEdge == Edge::kTail || skipped > 0 || width < kSector;
        is_wanted[i] = static_cast<uint32_t>(byte) < static_cast<uint32_t>(width) && is_edge;
        targets[i] = row_target + static_cast<uint32_t>(byte);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_wanted[i] && first_row + i * kRowStep < end_row) *reinterpret_cast<Element*>(targets[i]) = values[i];
      }
    }
  }

  // Copies rows first_row to end_row - 1, by kWarps of which this one has number `warp`. `has_head`, `has_tail`:
  // whether the rows' first and last elements are among those that are staged.
  template <int kSectors, int kWarps>
  __device__ __forceinline__ void copy(int first_sector, bool has_head, bool has_tail, int first_row, int warp,
                                       int end_row) const {
    constexpr int kEdgeRows = kElement * 32 / kSector, kEdgeStep = kWarps * kEdgeRows;
    copy_sectors<kSectors>(first_sector, first_row + warp * 8, kWarps * 8, end_row);
    first_row += warp * kEdgeRows;
    if (kWarps > 1 && width % kSector == 0) {
      copy_edges<Edge::kBoth, kEdgeStep>(first_row, end_row);
    } else {
      if (has_head) copy_edges<Edge::kHead, kEdgeStep>(first_row, end_row);
      if (has_tail) copy_edges<Edge::kTail, kEdgeStep>(first_row, end_row);
    }
  }
};

}  // namespace tcgemm
