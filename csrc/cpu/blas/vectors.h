// Level 1: one entry of a batch.
#pragma once

#include <algorithm>

#include "cpu/blas/element.h"

namespace tcgemm::host {

// Counts from 1, as BLAS does. A NaN is neither larger nor smaller than anything.
template <typename T>
int32_t index_of_extreme(int64_t n, Vector<const T> x, bool largest) {
  int64_t best = 0;
  Real<T> known = abs1(x[0]);
  for (int64_t i = 1; i < n; ++i) {
    const Real<T> candidate = abs1(x[i]);
    if (largest ? candidate > known : candidate < known) {
      best = i;
      known = candidate;
    }
  }
  return static_cast<int32_t>(best + 1);
}

template <typename T>
Real<T> asum(int64_t n, Vector<const T> x) {
  return interleaved_sum<Real<T>>(n, [&](int64_t i) { return abs1(x[i]); });
}

// The squares are summed in float64. Those of float64 itself are scaled by the largest component
// where they could leave its range.
template <typename T>
Real<T> nrm2(int64_t n, Vector<const T> x) {
  const auto sum_of_squares = [&](double scale) {
    return interleaved_sum<double>(n, [&](int64_t i) {
      const double re = std::real(x[i]) * scale, im = std::imag(x[i]) * scale;
      return re * re + im * im;
    });
  };
  const double sum = sum_of_squares(1.0);
  if constexpr (std::is_same_v<Real<T>, double>) {
    if (!(sum > 1e-250 && sum < 1e250) && sum == sum) {
      double largest = 0;
      for (int64_t i = 0; i < n; ++i) {
        largest = std::max({largest, std::fabs(std::real(x[i])), std::fabs(std::imag(x[i]))});
      }
      if (largest == 0 || std::isinf(largest)) return largest;
      // A power of two, so that scaling does not round.
      const double scale = std::ldexp(1.0, -std::clamp(std::ilogb(largest), -1021, 1021));
      return std::sqrt(sum_of_squares(scale)) / scale;
    }
  }
  return static_cast<Real<T>>(std::sqrt(sum));
}

template <typename T>
Value<T> dot(int64_t n, Vector<const T> x, Vector<const T> y, bool conjugate_x) {
  return interleaved_sum<Value<T>>(n, [&](int64_t i) { return conj_if(conjugate_x, x[i]) * y[i]; });
}

template <typename T>
void scal(int64_t n, Value<T> alpha, Vector<T> x) {
  for (int64_t i = 0; i < n; ++i) x.set(i, alpha * x[i]);
}

template <typename T>
void axpy(int64_t n, Value<T> alpha, Vector<const T> x, Vector<T> y) {
  for (int64_t i = 0; i < n; ++i) y.set(i, alpha * x[i] + y[i]);
}

template <typename T>
void swap(int64_t n, Vector<T> x, Vector<T> y) {
  for (int64_t i = 0; i < n; ++i) std::swap(x.data[i * x.increment], y.data[i * y.increment]);
}

}  // namespace tcgemm::host
