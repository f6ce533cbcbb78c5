// Levels 2 and 3 but for gemm: parts of one entry of a batch, cut so that threads share nothing.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/blas/element.h"

namespace tcgemm::host {

// A row-major matrix that is read, perhaps conjugated.
template <typename T>
struct Matrix {
  const T* data;
  int64_t ld;
  bool conjugate;

  Value<T> operator()(int64_t row, int64_t column) const {
    return conj_if(conjugate, Element<T>::load(data[row * ld + column]));
  }
};

// alpha * sum + beta * y[i], where y is not read for beta = 0.
template <typename T>
void update(Vector<T> y, int64_t i, Value<T> alpha, Value<T> sum, Value<T> beta) {
  y.set(i, beta == Value<T>(0) ? alpha * sum : alpha * sum + beta * y[i]);
}

// y[i] for the rows i in [begin, end) of A: alpha A x + beta y.
template <typename T>
void gemv_rows(Matrix<T> a, int64_t columns, Vector<const T> x, Vector<T> y, Value<T> alpha, Value<T> beta,
               int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto sum = interleaved_sum<Value<T>>(columns, [&](int64_t j) { return a(i, j) * x[j]; });
    update(y, i, alpha, sum, beta);
  }
}

// y[j] for the columns j in [begin, end) of A: alpha A^T x + beta y. Reads A by rows.
template <typename T>
void gemv_columns(Matrix<T> a, int64_t rows, Vector<const T> x, Vector<T> y, Value<T> alpha, Value<T> beta,
                  int64_t begin, int64_t end) {
  std::vector<Value<T>> sums(end - begin);
  for (int64_t i = 0; i < rows; ++i) {
    const Value<T> xi = x[i];
    for (int64_t j = begin; j < end; ++j) sums[j - begin] += a(i, j) * xi;
  }
  for (int64_t j = begin; j < end; ++j) update(y, j, alpha, sums[j - begin], beta);
}

// A band matrix, rows x columns: its element (i, j) lies at row i, column kl + j - i of `band`.
template <typename T>
struct Band {
  Matrix<T> band;
  int64_t rows, columns, kl, ku;

  Value<T> operator()(int64_t i, int64_t j) const { return band(i, kl + j - i); }
};

template <typename T>
void gbmv_rows(Band<T> a, Vector<const T> x, Vector<T> y, Value<T> alpha, Value<T> beta, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    Value<T> sum{};
    for (int64_t j = std::max<int64_t>(0, i - a.kl); j < std::min(a.columns, i + a.ku + 1); ++j) sum += a(i, j) * x[j];
    update(y, i, alpha, sum, beta);
  }
}

template <typename T>
void gbmv_columns(Band<T> a, Vector<const T> x, Vector<T> y, Value<T> alpha, Value<T> beta, int64_t begin,
                  int64_t end) {
  for (int64_t j = begin; j < end; ++j) {
    Value<T> sum{};
    for (int64_t i = std::max<int64_t>(0, j - a.ku); i < std::min(a.rows, j + a.kl + 1); ++i) sum += a(i, j) * x[i];
    update(y, j, alpha, sum, beta);
  }
}

// A triangular matrix M as its solvers see it: A or its transpose.
template <typename T>
struct Triangle {
  Matrix<T> a;
  int64_t n;
  bool transposed, upper, unit;  // upper: of A

  Value<T> operator()(int64_t i, int64_t j) const { return transposed ? a(j, i) : a(i, j); }
  bool solves_downwards() const { return upper == transposed; }
};

// Solves M x = x in place. A zero on the diagonal gives infinities and NaNs.
template <typename T>
void solve_vector(const Triangle<T>& m, Value<T>* x) {
  for (int64_t step = 0; step < m.n; ++step) {
    const int64_t i = m.solves_downwards() ? step : m.n - 1 - step;
    const int64_t begin = m.solves_downwards() ? 0 : i + 1, end = m.solves_downwards() ? i : m.n;
    if (!m.transposed) {
      x[i] -= interleaved_sum<Value<T>>(end - begin, [&](int64_t j) { return m.a(i, begin + j) * x[begin + j]; });
      if (!m.unit) x[i] /= m.a(i, i);
    } else {
      // By rows of A: what is known of x is taken from the equations still to solve.
      if (!m.unit) x[i] /= m.a(i, i);
      const int64_t next = m.solves_downwards() ? i + 1 : 0, last = m.solves_downwards() ? m.n : i;
      for (int64_t j = next; j < last; ++j) x[j] -= m.a(i, j) * x[i];
    }
  }
}

// Solves M X = alpha B in place for the columns [begin, end) of B.
template <typename T>
void solve_columns(const Triangle<T>& m, T* b, int64_t ldb, Value<T> alpha, int64_t begin, int64_t end) {
  const int64_t width = end - begin;
  std::vector<Value<T>> x(m.n * width);
  for (int64_t step = 0; step < m.n; ++step) {
    const int64_t i = m.solves_downwards() ? step : m.n - 1 - step;
    Value<T>* xi = &x[i * width];
    for (int64_t column = 0; column < width; ++column) {
      xi[column] = alpha * Element<T>::load(b[i * ldb + begin + column]);
    }
    for (int64_t j = m.solves_downwards() ? 0 : i + 1; j < (m.solves_downwards() ? i : m.n); ++j) {
      const Value<T> factor = m(i, j);
      const Value<T>* xj = &x[j * width];
      for (int64_t column = 0; column < width; ++column) xi[column] -= factor * xj[column];
    }
    if (!m.unit) {
      const Value<T> diagonal = m(i, i);
      for (int64_t column = 0; column < width; ++column) xi[column] /= diagonal;
    }
  }
  for (int64_t i = 0; i < m.n; ++i) {
    for (int64_t column = 0; column < width; ++column) {
      b[i * ldb + begin + column] = Element<T>::store(x[i * width + column]);
    }
  }
}

}  // namespace tcgemm::host
