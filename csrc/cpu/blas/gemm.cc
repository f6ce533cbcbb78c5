// gemm on the host GEMM, which knows neither conjugates nor complex scalars nor rows of C with gaps
// between them: a conjugated operand is copied, a product with complex scalars is scaled in a second
// pass, and rows with gaps, which a folded batch of vectors has, are packed for the call.
#include <algorithm>
#include <complex>
#include <cstring>
#include <vector>

#include "cpu/blas/host_blas.h"
#include "cpu/host_gemm.h"

namespace tcgemm {
namespace {

using blas::Op;

template <typename R>
void conjugate(const void* from, void* to, int64_t elements) {
  const auto* x = static_cast<const std::complex<R>*>(from);
  std::transform(x, x + elements, static_cast<std::complex<R>*>(to), [](std::complex<R> z) { return std::conj(z); });
}

// An operand as the host GEMM can read it; `copy` keeps what had to be written for it.
const void* without_conjugate(const void* data, Op op, DType dtype, int64_t elements, std::vector<char>* copy) {
  if (op != Op::kC || !blas::is_complex(dtype)) return data;
  copy->resize(elements * dtype_bytes(dtype));
  const auto run = dtype == DType::kC64 ? &conjugate<float> : &conjugate<double>;
  run(data, copy->data(), elements);
  return copy->data();
}

// d = alpha * product + beta * c, of complex numbers. `c` may be null and may be d.
template <typename R>
void combine(std::complex<double> alpha, const void* product, std::complex<double> beta, const void* c, void* d,
             int64_t elements) {
  using C = std::complex<R>;
  for (int64_t i = 0; i < elements; ++i) {
    C sum = C(alpha) * static_cast<const C*>(product)[i];
    if (c != nullptr) sum += C(beta) * static_cast<const C*>(c)[i];
    static_cast<C*>(d)[i] = sum;
  }
}

// Copies every row of C from one layout to another.
void copy_rows(const blas::Problem& p, const void* from, const blas::Layout& from_layout, void* to,
               const blas::Layout& to_layout) {
  const int64_t bytes = dtype_bytes(p.dtype);
  for (int64_t entry = 0; entry < p.batch; ++entry) {
    for (int64_t row = 0; row < p.m; ++row) {
      const auto offset = [&](const blas::Layout& x) { return (entry * x.batch_stride + row * x.ld) * bytes; };
      std::memcpy(static_cast<char*>(to) + offset(to_layout), static_cast<const char*>(from) + offset(from_layout),
                  static_cast<size_t>(p.n * bytes));
    }
  }
}

}  // namespace

Status host_blas_gemm(const blas::Problem& given, const blas::Buffers& buffers, std::complex<double> alpha,
                      std::complex<double> beta, void* stream) {
  const bool is_double = given.dtype == DType::kF64 || given.dtype == DType::kC128;
  Problem p;
  p.batch = p.batch_inner = given.batch;
  p.m = given.m;
  p.n = given.n;
  p.k = given.k;
  p.a = {given.dtype, given.op_a != Op::kN, given.a.ld, 0, given.a.batch_stride};
  p.b = {given.dtype, given.op_b != Op::kN, given.b.ld, 0, given.b.batch_stride};
  p.out = given.dtype;
  p.compute = is_double ? Compute::kF64 : Compute::kF32;
  const bool complex_scalars = alpha.imag() != 0.0 || beta.imag() != 0.0;
  p.alpha = complex_scalars ? 1.0 : alpha.real();
  p.beta = complex_scalars ? 0.0 : beta.real();
  const int64_t elements = p.batch * p.m * p.n;
  const blas::Layout packed_layout{p.n, p.m * p.n};
  const bool is_packed = given.c.ld == p.n && (p.batch == 1 || given.c.batch_stride == p.m * p.n);

  for (int64_t item = 0; item < given.items; ++item) {
    std::vector<char> a_copy, b_copy, product, packed;
    Buffers host_buffers{};
    host_buffers.a =
        without_conjugate(buffers.a[item], given.op_a, given.dtype, blas::required_elements_a(given), &a_copy);
    host_buffers.b =
        without_conjugate(buffers.b[item], given.op_b, given.dtype, blas::required_elements_b(given), &b_copy);
    const void* c = given.has_c && beta != 0.0 ? buffers.c[item] : nullptr;
    void* d = buffers.d[item];
    if (!is_packed) {
      packed.resize(elements * dtype_bytes(p.out));
      d = packed.data();
      if (c != nullptr) {
        copy_rows(given, c, given.c, d, packed_layout);
        c = d;
      }
    }
    host_buffers.c = complex_scalars ? nullptr : c;
    host_buffers.d = d;
    if (complex_scalars) {
      product.resize(elements * dtype_bytes(p.out));
      host_buffers.d = product.data();
    }
    if (std::string error = host_gemm()->reject(p, Device{}, "auto"); !error.empty()) return Status::invalid(error);
    const Status status = host_gemm()->launch(p, host_buffers, Device{}, "auto", stream);
    if (!status.is_ok()) return status;
    if (complex_scalars) {
      const auto run = p.out == DType::kC64 ? &combine<float> : &combine<double>;
      run(alpha, product.data(), beta, c, d, elements);
    }
    if (!is_packed) copy_rows(given, d, packed_layout, buffers.d[item], given.c);
  }
  return Status::ok();
}

}  // namespace tcgemm
