// Copies of operands into rows that TMA can read, transposed where the instruction needs K-major.
#pragma once

#include <cstdint>

#include "kernels/common/operand_copy_params.cuh"
#include "ptx/cluster.cuh"
#include "tile/unaligned.cuh"

namespace tcgemm::operand_copy {

// Blocks that run on a processor at once: with kSteps chunks a lane enough loads in flight to hide the memory, and room
// for nearly all blocks of a small copy together. Of bytes there are more to a chunk than registers for six.
template <typename T>
inline constexpr int kBlocksAtOnce = sizeof(T) == 1 ? 5 : 6;

template <typename T>
__device__ __forceinline__ const T* source_batch(const Part& part, int32_t batch_idx) {
  const CopyJob& job = part.job;
  const int32_t outer = part.inner.divide(batch_idx);
  return static_cast<const T*>(job.source) + outer * job.source_outer_stride +
         (batch_idx - outer * job.inner) * job.source_inner_stride;
}

// 16 bytes of which some lie outside the matrix; zeros for those, whose memory may belong to nobody.
template <typename T>
__device__ __forceinline__ uint4 load_cut_chunk(const char* address, const char* matrix, const char* matrix_end) {
  alignas(16) T values[16 / sizeof(T)];
#pragma unroll
  for (int i = 0; i < 16 / static_cast<int>(sizeof(T)); ++i) {
    const char* element = address + i * sizeof(T);
    values[i] = element >= matrix && element < matrix_end ? *reinterpret_cast<const T*>(element) : T(0);
  }
  return *reinterpret_cast<const uint4*>(values);
}

// Copies rows that start anywhere to rows that start on 16-byte boundaries: aligned loads, the bytes
// of two neighbors shifted together, aligned stores. What a row's last chunk holds past the row is
// whatever follows it in the source: the tensor map ends at the row's last element.
template <typename T>
__device__ __forceinline__ void pad_segment(const Part& part, int32_t block_idx) {
  const CopyJob& job = part.job;
  const RowWalk& walk = part.walk;
  const int lanes = 1 << walk.log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int32_t task = block_idx * kWarps + threadIdx.x / 32, group = part.segments.divide(task);
  const int32_t row = (group << (5 - walk.log2_lanes)) + (threadIdx.x % 32 >> walk.log2_lanes);
  const int32_t batch_idx = part.rows.divide(row);
  const bool is_inside = batch_idx < job.outer * job.inner;
  const int32_t first = (task - group * walk.segments) * (walk.steps << walk.log2_lanes) + lane;

  const char* matrix = reinterpret_cast<const char*>(source_batch<T>(part, batch_idx));
  const char* matrix_end = matrix + ((job.rows - 1) * job.source_ld + job.columns) * static_cast<int64_t>(sizeof(T));
  const char* source = matrix + (row - batch_idx * job.rows) * job.source_ld * static_cast<int64_t>(sizeof(T));
  const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 16);
  ptx::griddepcontrol_wait();
  // The segment's chunks as the source has them, one a lane and step; and the one after them. Those that the
  // matrix cuts are rare and come after the other loads, not between them: each jump would take as long.
  const char* address = source - skipped + int64_t{first} * 16;
  const int32_t most = walk.steps + (lane == 0), until_end = (walk.chunks - first + lanes) >> walk.log2_lanes;
  const int32_t count = is_inside ? min(most, until_end) : 0;
  const int64_t room = matrix_end - address - 16;
  const int32_t begin = address < matrix;
  const int32_t end = room < 0 ? 0 : static_cast<int32_t>(min(room >> (4 + walk.log2_lanes), int64_t{kSteps})) + 1;
  uint4 loaded[kSteps + 1];
#pragma unroll
  for (int i = 0; i <= kSteps; ++i) {
    if (i >= begin && i < min(count, end)) {
      // The copies are to stay in L2, not what they were made of.
      loaded[i] = __ldcs(reinterpret_cast<const uint4*>(address + (int64_t{16} * i << walk.log2_lanes)));
    }
  }
  if (min(count, begin) > 0 || count > end) {
#pragma unroll
    for (int i = 0; i <= kSteps; ++i) {
      if (i < count && (i < begin || i >= end)) {
        loaded[i] = load_cut_chunk<T>(address + (int64_t{16} * i << walk.log2_lanes), matrix, matrix_end);
      }
    }
  }
  uint4* target = reinterpret_cast<uint4*>(static_cast<T*>(job.target) + row * job.target_ld);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    // From the next lane; the last one's is the first one's of the next step.
    const uint4 given = lane == 0 ? loaded[i + 1] : loaded[i];
    const int giver = (lane + 1) & (lanes - 1);
    const uint4 next = make_uint4(__shfl_sync(~0u, given.x, giver, lanes), __shfl_sync(~0u, given.y, giver, lanes),
                                  __shfl_sync(~0u, given.z, giver, lanes), __shfl_sync(~0u, given.w, giver, lanes));
    const int32_t chunk = first + (i << walk.log2_lanes);
    if (i < min(count, walk.steps) && chunk < walk.chunks) target[chunk] = skip_bytes(loaded[i], next, skipped);
  }
}

// One square through shared memory, whose rows are one element longer so that a column of it
// falls into different banks.
template <typename T>
__device__ __forceinline__ void transpose_tile(const Part& part, int32_t block_idx) {
  const CopyJob& job = part.job;
  constexpr int kRowsAtOnce = kThreads / kTile, kSteps = kTile / kRowsAtOnce;
  __shared__ T tile[kTile][kTile + 1];
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  // Down the rows first: neighboring blocks then read neighboring parts of the source's rows.
  const int32_t tile_c = part.tiles_r.divide(block_idx), batch_idx = part.tiles_c.divide(tile_c);
  const int64_t row0 = (block_idx - tile_c * ((job.rows + kTile - 1) / kTile)) * kTile;
  const int64_t column0 = (tile_c - batch_idx * ((job.columns + kTile - 1) / kTile)) * kTile;
  const T* source = source_batch<T>(part, batch_idx) + (column0 + y) * job.source_ld + row0 + x;
  ptx::griddepcontrol_wait();
  T values[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const bool inside = column0 + y + i * kRowsAtOnce < job.columns && row0 + x < job.rows;
    values[i] = inside ? source[i * kRowsAtOnce * job.source_ld] : T(0);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) tile[y + i * kRowsAtOnce][x] = values[i];
  __syncthreads();
  T* target = static_cast<T*>(job.target) + (batch_idx * job.rows + row0 + y) * job.target_ld + column0 + x;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (row0 + y + i * kRowsAtOnce < job.rows && column0 + x < job.columns) {
      target[i * kRowsAtOnce * job.target_ld] = tile[x][y + i * kRowsAtOnce];
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>) copy_operands(const __grid_constant__ Copies copies) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::griddepcontrol_launch_dependents();
  const int32_t first_blocks = static_cast<int32_t>(copies.parts[0].blocks);
  const bool second = blockIdx.x >= first_blocks;
  const Part& part = copies.parts[second];
  const int32_t block_idx = blockIdx.x - (second ? first_blocks : 0);
  if (part.job.transpose) {
    transpose_tile<T>(part, block_idx);
  } else {
    pad_segment<T>(part, block_idx);
  }
#else
  __trap();  // only sm_90a machine code is ever launched
#endif
}

}  // namespace tcgemm::operand_copy
