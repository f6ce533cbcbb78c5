// Arithmetic on extents and strides that a malformed call may have made of any numbers.
#pragma once

#include <cstdint>
#include <limits>

namespace tcgemm {

// x * y + z of non-negative numbers; the largest int64, which no buffer reaches, where the result
// does not fit.
inline int64_t multiply_add(int64_t x, int64_t y, int64_t z) {
  int64_t product, sum;
  const bool fits = !__builtin_mul_overflow(x, y, &product) && !__builtin_add_overflow(product, z, &sum);
  return fits ? sum : std::numeric_limits<int64_t>::max();
}

}  // namespace tcgemm
