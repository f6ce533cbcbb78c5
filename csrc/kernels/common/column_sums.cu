#include "epilogue/fused.h"
#include "kernels/common/column_sums.h"
#include "kernels/common/early_start.cuh"

namespace tcgemm {
namespace {

constexpr int kThreads = 256;

// A thread adds up one column of kSumRows rows; blocks cover (batch, row block, columns).
__global__ void __launch_bounds__(kThreads) sum_rows(const void* d, FloatType type, float* partials, int64_t m,
                                                     int64_t columns, int64_t blocks_along, int64_t num_sum_blocks) {
  start_dependents();
  wait_for_previous();
  const int64_t column = blockIdx.x % blocks_along * kThreads + threadIdx.x, item = blockIdx.x / blocks_along;
  if (column >= columns) return;
  const int64_t batch_idx = item / num_sum_blocks, first = (item - batch_idx * num_sum_blocks) * kSumRows;
  const int rows = static_cast<int>(min(m - first, int64_t{kSumRows}));
  float sum = 0.0f;
  epilogue::visit(type, [&](auto tag) {
    const auto* source = static_cast<const decltype(tag)*>(d) + (batch_idx * m + first) * columns + column;
#pragma unroll 8
    for (int i = 0; i < rows; ++i) sum += convert<float>(source[i * columns]);
  });
  partials[item * columns + column] = sum;
}

// Eight lanes of threads share a column's partial sums and are added in order.
constexpr int kLanes = 8, kColumns = kThreads / kLanes;

__global__ void __launch_bounds__(kThreads)
    sum_partials(const float* partials, float* sums, int64_t columns, int64_t blocks_along, int64_t num_sum_blocks) {
  __shared__ float lane_sums[kLanes][kColumns];
  start_dependents();
  wait_for_previous();
  const int x = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  const int64_t column = blockIdx.x % blocks_along * kColumns + x, batch_idx = blockIdx.x / blocks_along;
  float sum = 0.0f;
  if (column < columns) {
    const float* source = partials + batch_idx * num_sum_blocks * columns + column;
#pragma unroll 8
    for (int64_t i = lane; i < num_sum_blocks; i += kLanes) sum += source[i * columns];
  }
  lane_sums[lane][x] = sum;
  __syncthreads();
  if (lane != 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kLanes; ++i) sum += lane_sums[i][x];
  sums[batch_idx * columns + column] = sum;
}

}  // namespace

Status launch_sum_of_partials(const Problem& p, const Buffers& buffers, const float* partials, bool starts_early,
                              cudaStream_t stream) {
  const int64_t blocks_along = (p.d_columns() + kColumns - 1) / kColumns;
  return launch_early(sum_partials, p.batch * blocks_along, kThreads, starts_early, stream, "column sums", partials,
                      static_cast<float*>(buffers.column_sums), p.d_columns(), blocks_along, sum_blocks(p));
}

Status launch_column_sums(const Problem& p, const Buffers& buffers, float* partials, bool starts_early,
                          cudaStream_t stream) {
  const int64_t blocks_along = (p.d_columns() + kThreads - 1) / kThreads;
  const Status status =
      launch_early(sum_rows, p.batch * sum_blocks(p) * blocks_along, kThreads, starts_early, stream, "column sums",
                   buffers.d, epilogue::float_type(p.out), partials, p.m, p.d_columns(), blocks_along, sum_blocks(p));
  return status.is_ok() ? launch_sum_of_partials(p, buffers, partials, starts_early, stream) : status;
}

}  // namespace tcgemm
