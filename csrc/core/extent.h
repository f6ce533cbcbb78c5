// Arithmetic on extents and strides that a malformed call may have made of any numbers.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

namespace tcgemm {

// x * y + z of non-negative numbers; the largest int64, which no buffer reaches, where the result
// does not fit.
inline int64_t multiply_add(int64_t x, int64_t y, int64_t z) {
  int64_t product, sum;
  const bool fits = !__builtin_mul_overflow(x, y, &product) && !__builtin_add_overflow(product, z, &sum);
  return fits ? sum : std::numeric_limits<int64_t>::max();
}

constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// What is wrong with a number.
inline std::string must(const std::string& what, const std::string& rule, int64_t got) {
  return what + " must " + rule + ", got " + std::to_string(got);
}

// What is wrong with the first extent that no kernel takes; empty when all are in range.
inline std::string check_extents(std::initializer_list<std::pair<const char*, int64_t>> extents) {
  for (const auto& [name, extent] : extents) {
    if (extent < 0 || extent > std::numeric_limits<int32_t>::max()) {
      return must(name, "be in [0, 2147483647]", extent);
    }
  }
  return "";
}

}  // namespace tcgemm
