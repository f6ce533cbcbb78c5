// Copies of operands into rows that TMA can read, transposed where the instruction needs K-major.
#include <algorithm>

#include "core/cuda_status.h"
#include "kernels/wgmma/launch.h"
#include "ptx/cluster.cuh"

namespace tcgemm::wgmma_family {
namespace {

constexpr int kThreads = 256;

constexpr int kWarps = kThreads / 32;

// What a warp pads at once, in words of 4 bytes: enough loads in flight to hide the memory.
constexpr int kSegmentWords = 512;
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

template <typename T>
__host__ __device__ int64_t words_per_row(const CopyJob& job) {
  return job.target_ld * static_cast<int64_t>(sizeof(T)) / 4;
}

// Part of one row a warp: four bytes a lane and step, contiguous across the warp. Wider accesses
// need an alignment that the source does not have; this way each 128-byte line is still touched
// once a load.
template <typename T>
__device__ __forceinline__ void pad_segment(const CopyJob& job, int64_t block_idx) {
  constexpr int kCount = 4 / sizeof(T), kSteps = kSegmentWords / 32;
  struct alignas(4) Pack {
    T values[kCount];
  };
  const int64_t words = words_per_row<T>(job), segments = ceil_div(words, kSegmentWords);
  const int64_t task = block_idx * kWarps + threadIdx.x / 32;
  const int64_t row = task / segments, batch_idx = row / job.rows;
  if (batch_idx >= job.outer * job.inner) return;
  const int64_t first = (task - row * segments) * kSegmentWords + threadIdx.x % 32;
  const T* source = source_batch<T>(job, batch_idx) + (row - batch_idx * job.rows) * job.source_ld;
  Pack* target = static_cast<Pack*>(job.target) + row * words;
  Pack packs[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t column = (first + i * 32) * kCount;
#pragma unroll
    for (int j = 0; j < kCount; ++j) packs[i].values[j] = column + j < job.columns ? source[column + j] : T(0);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (first + i * 32 < words) target[first + i * 32] = packs[i];
  }
}

// One square through shared memory, whose rows are one element longer so that a column of it
// falls into different banks.
template <typename T>
__device__ __forceinline__ void transpose_tile(const CopyJob& job, int64_t block_idx) {
  constexpr int kRowsAtOnce = kThreads / kTile, kSteps = kTile / kRowsAtOnce;
  __shared__ T tile[kTile][kTile + 1];
  const int64_t tiles_r = ceil_div(job.rows, kTile), tiles_c = ceil_div(job.target_ld, kTile);
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
    if (row0 + y + i * kRowsAtOnce < job.rows && column0 + x < job.target_ld) {
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
  if (job.transpose) return batches * ceil_div(job.rows, kTile) * ceil_div(job.target_ld, kTile);
  return ceil_div(batches * job.rows * ceil_div(words_per_row<T>(job), kSegmentWords), kWarps);
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
