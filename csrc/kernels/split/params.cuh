// What a launch tells the kernel.
#pragma once

#include <cstdint>

#include "tile/divisor.cuh"

namespace tcgemm::split {

inline constexpr int kThreads = 256;

// What kernels are compiled for: operands of real numbers, and the left and right ones of complex numbers.
enum class Operand : int32_t { kReal, kLeft, kRight };

// Strides count elements. A vector of D is the number (row * vectors + i) of (outer, middle, inner).
struct Params {
  const void* x;
  void* d;
  int32_t num_vectors;             // of one term and component
  Divisor vectors, inner, middle;  // of a row of D; and the extents of rows, as D has them
  int32_t row_vectors, num_inner, num_middle;
  int32_t x_inner, x_middle, columns;  // extents of X
  int64_t d_outer, d_middle, d_inner, d_term, d_component;
};

}  // namespace tcgemm::split
