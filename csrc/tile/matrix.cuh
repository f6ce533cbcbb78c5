// A batched input matrix as a kernel sees it.
#pragma once

#include <cstdint>

namespace tcgemm {

// See core/problem.h (Operand) for what ld and the two batch strides mean.
template <typename T>
struct BatchedMatrix {
  const T* data;
  int64_t ld;
  int64_t batch_outer_stride, batch_inner_stride, batch_inner;

  __device__ __forceinline__ const T* at_batch(int64_t batch_idx) const {
    return data + (batch_idx / batch_inner) * batch_outer_stride + (batch_idx % batch_inner) * batch_inner_stride;
  }
};

}  // namespace tcgemm
