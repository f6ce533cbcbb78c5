// Copies of operands into rows that TMA can read, transposed where the instruction needs K-major.
#include <algorithm>

#include "core/cuda_status.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm::wgmma_family {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ const T* source_batch(const CopyJob& job, int64_t batch_idx) {
  return static_cast<const T*>(job.source) + batch_idx / job.inner * job.source_outer_stride +
         batch_idx % job.inner * job.source_inner_stride;
}

// Four bytes of a row a thread: narrower reads than the rows' alignment allows would not be
// faster, since a warp still touches each 128-byte line once.
template <typename T>
__global__ void __launch_bounds__(kThreads) pad_rows(const __grid_constant__ CopyJob job) {
  constexpr int kCount = 4 / sizeof(T);
  struct alignas(4) Pack {
    T values[kCount];
  };
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t num_rows = job.outer * job.inner * job.rows;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const T* source = source_batch<T>(job, row / job.rows) + row % job.rows * job.source_ld;
    Pack* target = reinterpret_cast<Pack*>(static_cast<T*>(job.target) + row * job.target_ld);
#pragma unroll 8
    for (int64_t i = lane; i < job.target_ld / kCount; i += 32) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int64_t column = i * kCount + j;
        pack.values[j] = column < job.columns ? source[column] : T(0);
      }
      target[i] = pack;
    }
  }
}

// 32 x 32 tiles through shared memory, whose rows are one element longer so that a column of a
// tile falls into 32 different banks.
template <typename T>
__global__ void __launch_bounds__(kThreads) transpose_rows(const __grid_constant__ CopyJob job) {
  __shared__ T tile[32][33];
  const int64_t tiles_c = (job.target_ld + 31) / 32, tiles_r = (job.rows + 31) / 32;
  const int64_t num_tiles = job.outer * job.inner * tiles_r * tiles_c;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const int64_t batch_idx = index / (tiles_r * tiles_c);
    const int64_t row0 = index / tiles_c % tiles_r * 32, column0 = index % tiles_c * 32;
    const T* source = source_batch<T>(job, batch_idx);
#pragma unroll
    for (int i = y; i < 32; i += kThreads / 32) {
      const int64_t column = column0 + i, row = row0 + x;
      tile[i][x] = column < job.columns && row < job.rows ? source[column * job.source_ld + row] : T(0);
    }
    __syncthreads();
    T* target = static_cast<T*>(job.target) + batch_idx * job.rows * job.target_ld;
#pragma unroll
    for (int i = y; i < 32; i += kThreads / 32) {
      const int64_t row = row0 + i, column = column0 + x;
      if (row < job.rows && column < job.target_ld) target[row * job.target_ld + column] = tile[x][i];
    }
    __syncthreads();
  }
}

template <typename T>
Status launch_typed(const CopyJob& job, cudaStream_t stream) {
  const int64_t batches = job.outer * job.inner;
  const int64_t work = job.transpose ? batches * ((job.rows + 31) / 32) * ((job.target_ld + 31) / 32)
                                     : (batches * job.rows + kThreads / 32 - 1) / (kThreads / 32);
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(work, int64_t{1} << 30));
  if (job.transpose) {
    transpose_rows<T><<<grid, kThreads, 0, stream>>>(job);
  } else {
    pad_rows<T><<<grid, kThreads, 0, stream>>>(job);
  }
  return launch_status("operand copy kernel");
}

}  // namespace

Status launch_copy(const CopyJob& job, int64_t element_bytes, cudaStream_t stream) {
  return element_bytes == 2 ? launch_typed<uint16_t>(job, stream) : launch_typed<uint32_t>(job, stream);
}

}  // namespace tcgemm::wgmma_family
