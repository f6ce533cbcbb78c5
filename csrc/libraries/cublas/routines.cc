// cuBLAS is column-major and the problem row-major, so it is given the transposed problem over the
// same bytes: a matrix A is seen as A^T, its upper triangle as a lower one, its rows as columns.
//   y = op(A) x        ->  the other op of A^T
//   D = op(A) op(B)    ->  D^T = op(B)^T op(A)^T, whose ops are the same seen from B^T and A^T
//   op(A) X = B        ->  X^T op(A)^T = B^T: the other side, the other triangle, the same op
#include "libraries/cublas/routines.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "libraries/cublas/library.h"
#include "libraries/cublas/pointer_array.h"

namespace tcgemm::cublas {
namespace {

using blas::Op;
using blas::Routine;

// A batch count is a grid dimension in many kernels, with the limit of one.
constexpr int64_t kMaxBatch = 65535;

struct Type {
  cudaDataType_t element, scale;
  cudaDataType_t real, real_execution;  // of nrm2
  size_t index;                         // into Api's arrays of functions
};

Type type_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, 1};
    case DType::kC64: return {CUDA_C_32F, CUDA_C_32F, CUDA_R_32F, CUDA_R_32F, 2};
    case DType::kC128: return {CUDA_C_64F, CUDA_C_64F, CUDA_R_64F, CUDA_R_64F, 3};
    case DType::kF16: return {CUDA_R_16F, CUDA_R_32F, CUDA_R_16F, CUDA_R_32F, 4};
    case DType::kBF16: return {CUDA_R_16BF, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F, 5};
    default: return {CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, 0};
  }
}

cublasComputeType_t compute_type(DType dtype, blas::Math math) {
  const bool pedantic = math == blas::Math::kPedantic;
  if (dtype == DType::kF64 || dtype == DType::kC128) {
    return pedantic ? CUBLAS_COMPUTE_64F_PEDANTIC : CUBLAS_COMPUTE_64F;
  }
  const bool is_single = dtype == DType::kF32 || dtype == DType::kC64;
  if (math == blas::Math::kTF32 && is_single) return CUBLAS_COMPUTE_32F_FAST_TF32;
  return pedantic ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
}

// alpha or beta as cuBLAS reads it from host memory.
struct Scalar {
  alignas(16) unsigned char bytes[16] = {};

  Scalar(std::complex<double> x, DType dtype) {
    switch (blas::scale_dtype(dtype)) {
      case DType::kF64: store(x.real()); break;
      case DType::kC64: store(std::complex<float>(x)); break;
      case DType::kC128: store(x); break;
      default: store(static_cast<float>(x.real())); break;
    }
  }

  template <typename T>
  void store(T value) {
    static_assert(sizeof(T) <= sizeof(bytes), "a scalar has 16 bytes at most");
    std::memcpy(bytes, &value, sizeof(value));
  }
};

cublasOperation_t same(Op op) { return op == Op::kN ? CUBLAS_OP_N : op == Op::kT ? CUBLAS_OP_T : CUBLAS_OP_C; }
// Of a real matrix, or one that is not conjugated, seen from its transpose.
cublasOperation_t other(Op op) { return op == Op::kN ? CUBLAS_OP_T : CUBLAS_OP_N; }

class Run {
 public:
  explicit Run(const Launch& launch)
      : launch_(launch),
        api_(launch.api),
        handle_(launch.handle),
        p_(launch.problem),
        type_(type_of(p_.dtype)),
        bytes_(dtype_bytes(p_.dtype)),
        host_alpha_(p_.alpha, p_.dtype),
        host_beta_(p_.beta, p_.dtype),
        alpha_(p_.scalar_args ? launch.buffers.alpha : host_alpha_.bytes),
        beta_(p_.scalar_args ? launch.buffers.beta : host_beta_.bytes) {}

  Status operator()() {
    switch (p_.routine) {
      case Routine::kIamax: return index("cublasIamaxEx", api_.cublasIamaxEx);
      case Routine::kIamin: return index("cublasIaminEx", api_.cublasIaminEx);
      case Routine::kAsum: return asum();
      case Routine::kNrm2: return nrm2();
      case Routine::kDot: return dot();
      case Routine::kScal: return scal();
      case Routine::kAxpy: return axpy();
      case Routine::kSwap: return swap();
      case Routine::kGemv: return gemv();
      case Routine::kGbmv: return gbmv();
      case Routine::kTrsv: return trsv();
      case Routine::kTrsm: return p_.batch > 1 ? trsm_batched() : trsm();
      case Routine::kGemm: return p_.items > 1 ? gemm_of_pointers() : gemm();
    }
    return Status::internal("unknown routine");
  }

 private:
  Status check(const char* function, cublasStatus_t status) const {
    if (status == CUBLAS_STATUS_SUCCESS) return Status::ok();
    return to_status(api_, status, std::string(function) + " for " + blas::describe(p_));
  }

  // Calls body(i) for each entry of a batch that cuBLAS has no function for.
  template <typename Body>
  Status each(const char* function, const Body& body) const {
    for (int64_t i = 0; i < p_.batch; ++i) {
      if (Status s = check(function, body(i)); !s.is_ok()) return s;
    }
    return Status::ok();
  }

  // Calls body(first, count) for parts of a batch that one call takes.
  template <typename Body>
  Status parts(const char* function, int64_t batch, const Body& body) const {
    for (int64_t first = 0; first < batch; first += kMaxBatch) {
      const cublasStatus_t status = body(first, static_cast<int>(std::min(kMaxBatch, batch - first)));
      if (Status s = check(function, status); !s.is_ok()) return s;
    }
    return Status::ok();
  }

  const void* a(int64_t i) const { return entry(launch_.buffers.a[0], p_.a, i); }
  const void* b(int64_t i) const { return entry(launch_.buffers.b[0], p_.b, i); }
  void* d(int64_t i) const { return const_cast<void*>(entry(launch_.buffers.d[0], p_.c, i)); }
  const void* entry(const void* base, const blas::Layout& layout, int64_t i) const {
    return static_cast<const char*>(base) + i * layout.batch_stride * bytes_;
  }
  // Of a result that has one element for each entry.
  void* result(int64_t i, int64_t bytes) const { return static_cast<char*>(launch_.buffers.d[0]) + i * bytes; }

  Status index(const char* name, Index* function) const {
    return each(name, [&](int64_t i) {
      return function(handle_, n(), a(i), type_.element, lda(), static_cast<int*>(result(i, sizeof(int))));
    });
  }

  int64_t real_bytes() const { return dtype_bytes(blas::real_dtype(p_.dtype)); }

  Status asum() const {
    return each("cublas<T>asum",
                [&](int64_t i) { return api_.asum[type_.index](handle_, n(), a(i), lda(), result(i, real_bytes())); });
  }

  Status nrm2() const {
    return each("cublasNrm2Ex", [&](int64_t i) {
      return api_.cublasNrm2Ex(handle_, n(), a(i), type_.element, lda(), result(i, real_bytes()), type_.real,
                               type_.real_execution);
    });
  }

  Status dot() const {
    const bool conjugate = p_.op_a == Op::kC && blas::is_complex(p_.dtype);
    Dot* const function = conjugate ? api_.cublasDotcEx : api_.cublasDotEx;
    return each(conjugate ? "cublasDotcEx" : "cublasDotEx", [&](int64_t i) {
      return function(handle_, n(), a(i), type_.element, lda(), b(i), type_.element, ldb(), result(i, bytes_),
                      type_.element, type_.scale);
    });
  }

  Status scal() const {
    return each("cublasScalEx", [&](int64_t i) {
      return api_.cublasScalEx(handle_, n(), alpha_, type_.scale, d(i), type_.element, ldc(), type_.scale);
    });
  }

  Status axpy() const {
    return each("cublasAxpyEx", [&](int64_t i) {
      return api_.cublasAxpyEx(handle_, n(), alpha_, type_.scale, a(i), type_.element, lda(), d(i), type_.element,
                               ldc(), type_.scale);
    });
  }

  Status swap() const {
    return each("cublasSwapEx", [&](int64_t i) {
      void* const y = static_cast<char*>(launch_.buffers.d[1]) + i * p_.b.batch_stride * bytes_;
      return api_.cublasSwapEx(handle_, n(), d(i), type_.element, ldc(), y, type_.element, ldb());
    });
  }

  Status gemv() const {
    if (p_.batch == 1 && type_.index < api_.gemv.size()) {
      return check("cublas<t>gemv", api_.gemv[type_.index](handle_, other(p_.op_a), n(), m(), alpha_, a(0), lda(), b(0),
                                                           ldb(), beta_, d(0), ldc()));
    }
    return parts("cublas<t>gemvStridedBatched", p_.batch, [&](int64_t first, int count) {
      return api_.gemv_strided_batched[type_.index](handle_, other(p_.op_a), n(), m(), alpha_, a(first), lda(),
                                                    p_.a.batch_stride, b(first), ldb(), p_.b.batch_stride, beta_,
                                                    d(first), ldc(), p_.c.batch_stride, count);
    });
  }

  Status gbmv() const {
    return each("cublas<t>gbmv", [&](int64_t i) {
      return api_.gbmv[type_.index](handle_, other(p_.op_a), n(), m(), static_cast<int>(p_.ku), static_cast<int>(p_.kl),
                                    alpha_, a(i), lda(), b(i), ldb(), beta_, d(i), ldc());
    });
  }

  cublasFillMode_t fill() const { return p_.upper ? CUBLAS_FILL_MODE_LOWER : CUBLAS_FILL_MODE_UPPER; }
  cublasSideMode_t side() const { return p_.right ? CUBLAS_SIDE_LEFT : CUBLAS_SIDE_RIGHT; }
  cublasDiagType_t diagonal() const { return p_.unit ? CUBLAS_DIAG_UNIT : CUBLAS_DIAG_NON_UNIT; }

  Status trsv() const {
    return check("cublas<t>trsv",
                 api_.trsv[type_.index](handle_, fill(), other(p_.op_a), diagonal(), m(), a(0), lda(), d(0), ldc()));
  }

  Status trsm() const {
    return check("cublas<t>trsm", api_.trsm[type_.index](handle_, side(), fill(), same(p_.op_a), diagonal(), n(), m(),
                                                         alpha_, a(0), lda(), d(0), ldc()));
  }

  Status trsm_batched() const {
    const void** const a_pointers = launch_.pointers;
    const void** const d_pointers = launch_.pointers + p_.batch;
    if (Status s =
            fill_pointers({a(0)}, p_.a.batch_stride * bytes_, p_.batch, a_pointers, launch_.device, launch_.stream);
        !s.is_ok())
      return s;
    if (Status s =
            fill_pointers({d(0)}, p_.c.batch_stride * bytes_, p_.batch, d_pointers, launch_.device, launch_.stream);
        !s.is_ok())
      return s;
    return parts("cublas<t>trsmBatched", p_.batch, [&](int64_t first, int count) {
      return api_.trsm_batched[type_.index](handle_, side(), fill(), same(p_.op_a), diagonal(), n(), m(), alpha_,
                                            a_pointers + first, lda(), const_cast<void* const*>(d_pointers + first),
                                            ldc(), count);
    });
  }

  Status gemm() const {
    if (p_.batch == 1) {
      return check("cublasGemmEx", api_.cublasGemmEx(handle_, same(p_.op_b), same(p_.op_a), n(), m(), k(), alpha_, b(0),
                                                     type_.element, ldb(), a(0), type_.element, lda(), beta_, d(0),
                                                     type_.element, ldc(), compute(), CUBLAS_GEMM_DEFAULT));
    }
    return parts("cublasGemmStridedBatchedEx", p_.batch, [&](int64_t first, int count) {
      return api_.cublasGemmStridedBatchedEx(handle_, same(p_.op_b), same(p_.op_a), n(), m(), k(), alpha_, b(first),
                                             type_.element, ldb(), p_.b.batch_stride, a(first), type_.element, lda(),
                                             p_.a.batch_stride, beta_, d(first), type_.element, ldc(),
                                             p_.c.batch_stride, count, compute(), CUBLAS_GEMM_DEFAULT);
    });
  }

  Status gemm_of_pointers() const {
    const int64_t count = p_.items * p_.batch;
    const void** const a_pointers = launch_.pointers;
    const void** const b_pointers = a_pointers + count;
    const void** const d_pointers = b_pointers + count;
    const std::vector<const void*> results(launch_.buffers.d.begin(), launch_.buffers.d.end());
    for (const auto& [bases, layout, pointers] :
         {std::tuple{&launch_.buffers.a, &p_.a, a_pointers}, std::tuple{&launch_.buffers.b, &p_.b, b_pointers},
          std::tuple{&results, &p_.c, d_pointers}}) {
      if (Status s =
              fill_pointers(*bases, layout->batch_stride * bytes_, p_.batch, pointers, launch_.device, launch_.stream);
          !s.is_ok())
        return s;
    }
    return parts("cublasGemmBatchedEx", count, [&](int64_t first, int part) {
      return api_.cublasGemmBatchedEx(handle_, same(p_.op_b), same(p_.op_a), n(), m(), k(), alpha_, b_pointers + first,
                                      type_.element, ldb(), a_pointers + first, type_.element, lda(), beta_,
                                      const_cast<void* const*>(d_pointers + first), type_.element, ldc(), part,
                                      compute(), CUBLAS_GEMM_DEFAULT);
    });
  }

  // check_problem() keeps all of them below 2^31.
  int m() const { return static_cast<int>(p_.m); }
  int n() const { return static_cast<int>(p_.n); }
  int k() const { return static_cast<int>(p_.k); }
  int lda() const { return static_cast<int>(p_.a.ld); }
  int ldb() const { return static_cast<int>(p_.b.ld); }
  int ldc() const { return static_cast<int>(p_.c.ld); }
  cublasComputeType_t compute() const { return compute_type(p_.dtype, p_.math); }

  const Launch& launch_;
  const Api& api_;
  cublasHandle_t handle_;
  const blas::Problem& p_;
  Type type_;
  int64_t bytes_;
  Scalar host_alpha_, host_beta_;
  const void* alpha_;
  const void* beta_;
};

}  // namespace

Status run(const Launch& launch) { return Run(launch)(); }

}  // namespace tcgemm::cublas
