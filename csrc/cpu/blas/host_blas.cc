#include "cpu/blas/host_blas.h"

#include <cstring>

#include "cpu/blas/matrices.h"
#include "cpu/blas/vectors.h"
#include "cpu/executor.h"

namespace tcgemm {
namespace {

using blas::Buffers;
using blas::Op;
using blas::Problem;
using blas::Routine;

// Calls body(batch_idx, begin, end) over all of [0, extent) of every batch entry, in parts of `part`.
template <typename Body>
void for_parts(const Executor& executor, int64_t batch, int64_t extent, int64_t part, const Body& body) {
  const int64_t parts = (extent + part - 1) / part;
  executor.parallel_for(batch * parts, [&](int64_t i) {
    const int64_t begin = i % parts * part;
    body(i / parts, begin, std::min(extent, begin + part));
  });
}

// Rows or columns of `work` multiply-adds each that are worth waking a thread for.
int64_t part_of(int64_t work) { return std::max<int64_t>(64, (int64_t{1} << 18) / std::max<int64_t>(1, work)); }

template <typename T>
class Run {
 public:
  using V = host::Value<T>;

  Run(const Problem& p, const Buffers& buffers, std::complex<double> alpha, std::complex<double> beta,
      const Executor& executor)
      : p_(p),
        buffers_(buffers),
        alpha_(host::scalar_from<V>(alpha)),
        beta_(host::scalar_from<V>(beta)),
        executor_(executor),
        conjugate_a_(p.op_a == Op::kC) {}

  void operator()() const {
    switch (p_.routine) {
      case Routine::kIamax:
      case Routine::kIamin:
        return each([&](int64_t i) {
          result<int32_t>(i) = host::index_of_extreme<T>(p_.n, a(i), p_.routine == Routine::kIamax);
        });
      case Routine::kAsum: return each([&](int64_t i) { store_real(i, host::asum<T>(p_.n, a(i))); });
      case Routine::kNrm2: return each([&](int64_t i) { store_real(i, host::nrm2<T>(p_.n, a(i))); });
      case Routine::kDot:
        return each(
            [&](int64_t i) { result<T>(i) = host::Element<T>::store(host::dot<T>(p_.n, a(i), b(i), conjugate_a_)); });
      case Routine::kScal: return each([&](int64_t i) { host::scal<T>(p_.n, alpha_, d(i)); });
      case Routine::kAxpy: return each([&](int64_t i) { host::axpy<T>(p_.n, alpha_, a(i), d(i)); });
      case Routine::kSwap:
        return each([&](int64_t i) {
          T* y = static_cast<T*>(buffers_.d[1]) + i * p_.b.batch_stride;
          host::swap<T>(p_.n, d(i), {y, p_.b.ld});
        });
      case Routine::kGemv: return gemv();
      case Routine::kGbmv: return gbmv();
      case Routine::kTrsv: return trsv();
      case Routine::kTrsm: return trsm();
      case Routine::kGemm: return;  // host_blas_gemm()
    }
  }

 private:
  template <typename Body>
  void each(const Body& body) const {
    executor_.parallel_for(p_.batch, body);
  }

  host::Vector<const T> a(int64_t batch_idx) const { return {entry(buffers_.a, p_.a, batch_idx), p_.a.ld}; }
  host::Vector<const T> b(int64_t batch_idx) const { return {entry(buffers_.b, p_.b, batch_idx), p_.b.ld}; }
  host::Vector<T> d(int64_t batch_idx) const {
    return {static_cast<T*>(buffers_.d[0]) + batch_idx * p_.c.batch_stride, p_.c.ld};
  }
  host::Matrix<T> matrix(int64_t batch_idx) const {
    return {entry(buffers_.a, p_.a, batch_idx), p_.a.ld, conjugate_a_};
  }
  static const T* entry(const std::vector<const void*>& base, const blas::Layout& layout, int64_t batch_idx) {
    return static_cast<const T*>(base[0]) + batch_idx * layout.batch_stride;
  }

  template <typename R>
  R& result(int64_t batch_idx) const {
    return static_cast<R*>(buffers_.d[0])[batch_idx];
  }
  // A result of the real dtype that belongs to T: for half types T itself.
  void store_real(int64_t batch_idx, host::Real<T> x) const {
    if constexpr (std::is_same_v<host::Value<T>, host::Real<T>>) {
      result<T>(batch_idx) = host::Element<T>::store(x);
    } else {
      result<host::Real<T>>(batch_idx) = x;
    }
  }

  void gemv() const {
    const bool by_rows = p_.op_a == Op::kN;
    const int64_t extent = by_rows ? p_.m : p_.n, length = by_rows ? p_.n : p_.m;
    for_parts(executor_, p_.batch, extent, part_of(length), [&](int64_t i, int64_t begin, int64_t end) {
      const auto kernel = by_rows ? &host::gemv_rows<T> : &host::gemv_columns<T>;
      kernel(matrix(i), length, b(i), d(i), alpha_, beta_, begin, end);
    });
  }

  void gbmv() const {
    const bool by_rows = p_.op_a == Op::kN;
    for_parts(executor_, p_.batch, by_rows ? p_.m : p_.n, part_of(p_.kl + p_.ku + 1),
              [&](int64_t i, int64_t begin, int64_t end) {
                const host::Band<T> band{matrix(i), p_.m, p_.n, p_.kl, p_.ku};
                const auto kernel = by_rows ? &host::gbmv_rows<T> : &host::gbmv_columns<T>;
                kernel(band, b(i), d(i), alpha_, beta_, begin, end);
              });
  }

  host::Triangle<T> triangle(int64_t batch_idx, int64_t n, bool transposed) const {
    return {matrix(batch_idx), n, transposed, p_.upper, p_.unit};
  }

  void trsv() const {
    each([&](int64_t i) {
      const host::Vector<T> x = d(i);
      std::vector<V> values(p_.m);
      for (int64_t j = 0; j < p_.m; ++j) values[j] = x[j];
      host::solve_vector(triangle(i, p_.m, p_.op_a != Op::kN), values.data());
      for (int64_t j = 0; j < p_.m; ++j) x.set(j, values[j]);
    });
  }

  void trsm() const {
    if (!p_.right) {
      for_parts(executor_, p_.batch, p_.n, std::min<int64_t>(256, part_of(p_.m * p_.m)),
                [&](int64_t i, int64_t begin, int64_t end) {
                  host::solve_columns(triangle(i, p_.m, p_.op_a != Op::kN), d(i).data, p_.c.ld, alpha_, begin, end);
                });
      return;
    }
    // X op(A) = alpha B: each row x of X solves op(A)^T x = alpha b.
    const int64_t part = std::max<int64_t>(1, part_of(p_.n * p_.n) / 64);
    for_parts(executor_, p_.batch, p_.m, part, [&](int64_t i, int64_t begin, int64_t end) {
      std::vector<V> x(p_.n);
      const auto m = triangle(i, p_.n, p_.op_a == Op::kN);
      for (int64_t row = begin; row < end; ++row) {
        const host::Vector<T> b{d(i).data + row * p_.c.ld, 1};
        for (int64_t j = 0; j < p_.n; ++j) x[j] = alpha_ * b[j];
        host::solve_vector(m, x.data());
        for (int64_t j = 0; j < p_.n; ++j) b.set(j, x[j]);
      }
    });
  }

  const Problem& p_;
  const Buffers& buffers_;
  V alpha_, beta_;
  const Executor& executor_;
  bool conjugate_a_;
};

// A scalar that is an array: its dtype is that of the sums.
std::complex<double> read_scalar(const void* address, DType dtype) {
  switch (dtype) {
    case DType::kF64: return *static_cast<const double*>(address);
    case DType::kC64: return std::complex<double>(*static_cast<const std::complex<float>*>(address));
    case DType::kC128: return *static_cast<const std::complex<double>*>(address);
    default: return *static_cast<const float*>(address);
  }
}

class HostBlas final : public blas::Implementation {
 public:
  const char* name() const override { return "host"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> configs{"default"};
    return configs;
  }

  Features features() const override {
    return {Feature::kAlpha, Feature::kBeta, Feature::kScalarArgs, Feature::kItems};
  }

  std::string reject_rest(const Problem& p, const Device&, std::string_view) const override {
    if (p.routine == Routine::kGemm && p.c.ld != p.n) return "c_ld must be n, got " + std::to_string(p.c.ld);
    return "";
  }

  Status launch(const Problem& given, const Buffers& given_buffers, const Device&, std::string_view,
                void* stream) const override {
    Problem p = given;
    Buffers buffers = given_buffers;
    blas::fold_batch(&p, &buffers);
    std::complex<double> alpha = p.alpha, beta = p.beta;
    if (p.scalar_args) {
      alpha = read_scalar(buffers.alpha, blas::scale_dtype(p.dtype));
      beta = p.has_c ? read_scalar(buffers.beta, blas::scale_dtype(p.dtype)) : 0.0;
    }
    for (size_t i = 0; i < buffers.c.size(); ++i) {
      if (buffers.c[i] != buffers.d[i])
        std::memcpy(buffers.d[i], buffers.c[i], static_cast<size_t>(buffers.c_bytes[i]));
    }
    if (p.routine == Routine::kGemm) return host_blas_gemm(p, buffers, alpha, beta, stream);
    const Executor& executor = *static_cast<const Executor*>(stream);
    switch (p.dtype) {
      case DType::kF16: Run<host::F16>(p, buffers, alpha, beta, executor)(); break;
      case DType::kBF16: Run<host::BF16>(p, buffers, alpha, beta, executor)(); break;
      case DType::kF32: Run<float>(p, buffers, alpha, beta, executor)(); break;
      case DType::kF64: Run<double>(p, buffers, alpha, beta, executor)(); break;
      case DType::kC64: Run<std::complex<float>>(p, buffers, alpha, beta, executor)(); break;
      case DType::kC128: Run<std::complex<double>>(p, buffers, alpha, beta, executor)(); break;
      default: return Status::invalid(std::string("no routine for ") + name_of(p.dtype));
    }
    return Status::ok();
  }
};

}  // namespace

const blas::Implementation* host_blas() {
  static const HostBlas implementation;
  return &implementation;
}

}  // namespace tcgemm
