// Prefetches of what an epilogue function reads.
#pragma once

#include <cstdint>

#include "epilogue/function_params.h"
#include "epilogue/function_reads.cuh"
#include "ptx/global_memory.cuh"

namespace tcgemm::epilogue {

// Brings to L2 what a function will read of matrices in a part of the product, and with kVectors of vectors along its
// columns, by `num_threads` threads.
template <typename F, bool kVectors = false>
struct FunctionPrefetch {
  const FunctionParams& params;
  const MatrixIndex batch;
  const int32_t m, n, rows, columns;  // may go past the product
  const int thread_idx, num_threads;

  __device__ __forceinline__ void run() const { F::load(*this); }

  template <int i, typename T, Along along>
  __device__ __forceinline__ void load() const {
    if (!(along == Along::kBoth || (kVectors && along == Along::kN)) || !params.in_eights) return;
    const FunctionParams::Read& read = params.reads[i];
    const T* data = batch.first<T>(read);
    const int32_t end = along == Along::kN ? m + 1 : min(m + rows, batch.m_end);
    const int64_t bytes = static_cast<int64_t>(min(columns, params.n - n)) * sizeof(T);
    for (int32_t row = m + thread_idx; row < end; row += num_threads) {
      const char* line = reinterpret_cast<const char*>(data + row_offset(read, row) + n);
      for (int64_t byte = 0; byte < bytes; byte += 128) ptx::prefetch_global_l2(line + byte);
    }
  }
};

}  // namespace tcgemm::epilogue
