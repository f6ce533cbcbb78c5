// Copies of operands into rows that TMA can read, transposed where the instruction needs K-major.
#include <algorithm>

#include "core/cuda_status.h"
#include "kernels/wgmma/launch.h"
#include "ptx/cluster.cuh"
#include "tile/unaligned.cuh"

namespace tcgemm::wgmma_family {
namespace {

constexpr int kThreads = 256;

constexpr int kWarps = kThreads / 32;

// 16-byte chunks that a lane copies at most: enough loads in flight to hide the memory.
constexpr int kSteps = 8;
// Side of the square that a block transposes.
constexpr int kTile = 64;

struct Copies {
  CopyJob jobs[2];
  int64_t blocks[2];
};

template <typename T>
__device__ __forceinline__ const T* source_batch(const CopyJob& job, int64_t batch_idx) {
  return static_cast<const T*>(job.source) + batch_idx / job.inner * job.source_outer_stride +
         batch_idx % job.inner * job.source_inner_stride;
}

__host__ __device__ int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Rows of 16-byte chunks, cut into segments of equal size. A power of two of neighbouring lanes takes
// a segment, at most a whole warp, so that short rows leave few lanes idle.
struct RowWalk {
  int64_t chunks, segments;  // in a row
  int log2_lanes, steps;

  template <typename T>
  __host__ __device__ static RowWalk of(const CopyJob& job) {
    RowWalk walk{ceil_div(job.columns * static_cast<int64_t>(sizeof(T)), 16), 0, 0, 0};
    while (walk.log2_lanes < 5 && (int64_t{1} << walk.log2_lanes) < walk.chunks) ++walk.log2_lanes;
    walk.segments = ceil_div(walk.chunks, kSteps << walk.log2_lanes);
    walk.steps = static_cast<int>(ceil_div(walk.chunks, walk.segments << walk.log2_lanes));
    return walk;
  }
  __host__ __device__ int rows_per_warp() const { return 32 >> log2_lanes; }
};

// 16 bytes at `address`; zeros for those outside the matrix, whose memory may belong to nobody.
template <typename T>
__device__ __forceinline__ uint4 load_chunk(const char* address, const char* matrix, const char* matrix_end) {
  if (address >= matrix && address + 16 <= matrix_end) return *reinterpret_cast<const uint4*>(address);
  alignas(16) T values[16 / sizeof(T)];
#pragma unroll
  for (int i = 0; i < 16 / static_cast<int>(sizeof(T)); ++i) {
    const char* element = address + i * sizeof(T);
    values[i] = element >= matrix && element < matrix_end ? *reinterpret_cast<const T*>(element) : T(0);
  }
  return *reinterpret_cast<const uint4*>(values);
}

// Copies rows that start anywhere to rows that start on 16-byte boundaries: aligned loads, the bytes
// of two neighbours shifted together, aligned stores. What a row's last chunk holds past the row is
// whatever follows it in the source: the tensor map ends at the row's last element.
template <typename T>
__device__ __forceinline__ void pad_segment(const CopyJob& job, int64_t block_idx) {
  const RowWalk walk = RowWalk::of<T>(job);
  const int lanes = 1 << walk.log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t task = block_idx * kWarps + threadIdx.x / 32, group = task / walk.segments;
  const int64_t row = group * walk.rows_per_warp() + (threadIdx.x % 32 >> walk.log2_lanes), batch_idx = row / job.rows;
  const bool is_inside = batch_idx < job.outer * job.inner;
  const int64_t first = (task - group * walk.segments) * (walk.steps * lanes) + lane;

  const char* matrix = reinterpret_cast<const char*>(source_batch<T>(job, batch_idx));
  const char* matrix_end = matrix + ((job.rows - 1) * job.source_ld + job.columns) * static_cast<int64_t>(sizeof(T));
  const char* source = matrix + (row - batch_idx * job.rows) * job.source_ld * static_cast<int64_t>(sizeof(T));
  const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 16);
  // The segment's chunks as the source has them, one a lane and step; and the one after them.
  uint4 loaded[kSteps + 1];
#pragma unroll
  for (int i = 0; i <= kSteps; ++i) {
    const int64_t chunk = first + i * lanes;
    const bool is_needed = i < walk.steps || (i == walk.steps && lane == 0);
    if (is_inside && is_needed && chunk <= walk.chunks) {
      loaded[i] = load_chunk<T>(source - skipped + chunk * 16, matrix, matrix_end);
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
    const int64_t chunk = first + i * lanes;
    if (is_inside && i < walk.steps && chunk < walk.chunks) target[chunk] = skip_bytes(loaded[i], next, skipped);
  }
}

// One square through shared memory, whose rows are one element longer so that a column of it
// falls into different banks.
template <typename T>
__device__ __forceinline__ void transpose_tile(const CopyJob& job, int64_t block_idx) {
  constexpr int kRowsAtOnce = kThreads / kTile, kSteps = kTile / kRowsAtOnce;
  __shared__ T tile[kTile][kTile + 1];
  const int64_t tiles_r = ceil_div(job.rows, kTile), tiles_c = ceil_div(job.columns, kTile);
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  const int64_t tile_c = block_idx / tiles_r, batch_idx = tile_c / tiles_c;
  // Down the rows first: neighbouring blocks then read neighbouring parts of the source's rows.
  const int64_t row0 = (block_idx - tile_c * tiles_r) * kTile, column0 = (tile_c - batch_idx * tiles_c) * kTile;
  const T* source = source_batch<T>(job, batch_idx) + (column0 + y) * job.source_ld + row0 + x;
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
__global__ void __launch_bounds__(kThreads) copy_operands(const __grid_constant__ Copies copies) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const bool second = blockIdx.x >= copies.blocks[0];
  const CopyJob& job = copies.jobs[second];
  const int64_t block_idx = second ? blockIdx.x - copies.blocks[0] : blockIdx.x;
  if (job.transpose) {
    transpose_tile<T>(job, block_idx);
  } else {
    pad_segment<T>(job, block_idx);
  }
#else
  __trap();  // only sm_90a machine code of this family is ever launched
#endif
}

template <typename T>
int64_t num_blocks(const CopyJob& job) {
  const int64_t batches = job.outer * job.inner;
  if (job.rows == 0) return 0;
  if (job.transpose) return batches * ceil_div(job.rows, kTile) * ceil_div(job.columns, kTile);
  const RowWalk walk = RowWalk::of<T>(job);
  return ceil_div(ceil_div(batches * job.rows, walk.rows_per_warp()) * walk.segments, kWarps);
}

template <typename T>
Status launch_typed(const CopyJob (&jobs)[2], cudaStream_t stream) {
  const Copies copies{{jobs[0], jobs[1]}, {num_blocks<T>(jobs[0]), num_blocks<T>(jobs[1])}};
  const int64_t blocks = copies.blocks[0] + copies.blocks[1];
  if (blocks > INT32_MAX) return Status::invalid("an operand that needs a copy must have less than 2^42 bytes");
  cudaLaunchAttribute attribute = programmatic_launch();
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&launch, copy_operands<T>, copies), "operand copy kernel");
}

}  // namespace

Status launch_copies(const CopyJob (&jobs)[2], int64_t element_bytes, cudaStream_t stream) {
  return element_bytes == 2 ? launch_typed<uint16_t>(jobs, stream) : launch_typed<uint32_t>(jobs, stream);
}

}  // namespace tcgemm::wgmma_family
