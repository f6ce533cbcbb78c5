// Element types as the routines compute with them: half types in float32, others as they are.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <type_traits>

#include "cpu/number_formats.h"

namespace tcgemm::host {

template <typename T>
struct Element {
  using Real = T;   // of a component
  using Value = T;  // what sums are kept in
  static Value load(T x) { return x; }
  static T store(Value x) { return x; }
};
template <typename R>
struct Element<std::complex<R>> {
  using Real = R;
  using Value = std::complex<R>;
  static Value load(Value x) { return x; }
  static Value store(Value x) { return x; }
};
template <>
struct Element<F16> {
  using Real = float;
  using Value = float;
  static float load(F16 x) { return to_real(x); }
  static F16 store(float x) { return to_f16(x); }
};
template <>
struct Element<BF16> {
  using Real = float;
  using Value = float;
  static float load(BF16 x) { return to_real(x); }
  static BF16 store(float x) { return to_bf16(x); }
};

template <typename T>
using Real = typename Element<T>::Real;
template <typename T>
using Value = typename Element<T>::Value;

template <typename R>
R conj_if(bool, R x) {
  return x;
}
template <typename R>
std::complex<R> conj_if(bool conjugate, std::complex<R> x) {
  return conjugate ? std::conj(x) : x;
}

// |re| + |im|, BLAS's cheap absolute value.
template <typename R>
R abs1(R x) {
  return std::fabs(x);
}
template <typename R>
R abs1(std::complex<R> x) {
  return std::fabs(x.real()) + std::fabs(x.imag());
}

// alpha or beta in the type of sums.
template <typename V>
V scalar_from(std::complex<double> x) {
  if constexpr (std::is_arithmetic_v<V>) {
    return static_cast<V>(x.real());
  } else {
    return V(x);
  }
}

// A vector in memory: element i lies at i * increment.
template <typename T>
struct Vector {
  T* data;
  int64_t increment;

  Value<T> operator[](int64_t i) const { return Element<std::remove_const_t<T>>::load(data[i * increment]); }
  void set(int64_t i, Value<T> x) const { data[i * increment] = Element<T>::store(x); }
};
template <typename T>
struct Element<const T> : Element<T> {};

// sum of term(i) over [0, n), in sixteen interleaved sums: the compiler makes vectors of them, and
// the error grows with n / 16.
template <typename V, typename Term>
V interleaved_sum(int64_t n, const Term& term) {
  constexpr int kLanes = 16;
  V lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int lane = 0; i + lane < n; ++lane) lanes[lane] += term(i + lane);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace tcgemm::host
