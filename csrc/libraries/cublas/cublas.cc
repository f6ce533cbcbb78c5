// cuBLAS as an implementation of BLAS calls: one handle a call, its modes, its scratch memory, and
// the batches that cuBLAS has another function for. routines.cc calls the functions.
#include "libraries/cublas/cublas.h"

#include "core/cuda_status.h"
#include "core/relaxed_capture.h"
#include "libraries/cublas/library.h"
#include "libraries/cublas/pointer_array.h"
#include "libraries/cublas/routines.h"

namespace tcgemm {
namespace {

using blas::Buffers;
using blas::Math;
using blas::Op;
using blas::Problem;
using blas::Routine;

// What cublasSetWorkspace asks for; XLA promises less.
constexpr int64_t kAlignment = 256;
constexpr int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool conjugates(const Problem& p) { return p.op_a == Op::kC && blas::is_complex(p.dtype); }

// What cuBLAS has under another name only: batches, and the conjugates of row-major matrices, which
// are conjugates without a transpose of column-major ones.
void rename(Problem* problem) {
  Problem& p = *problem;
  if (p.routine == Routine::kDot && p.batch > 1) {
    p.routine = Routine::kGemm;
    p.op_a = p.op_a == Op::kC ? Op::kC : Op::kT;
    p.k = p.n;
    p.n = 1;
    p.c = {1, 1};
  } else if (p.routine == Routine::kGemv && conjugates(p)) {
    p.routine = Routine::kGemm;
    p.k = p.m;
    p.m = p.n;
    p.n = 1;
  } else if (p.routine == Routine::kTrsv && (p.batch > 1 || conjugates(p))) {
    p.routine = Routine::kTrsm;
    p.n = 1;
  }
}

bool needs_pointers(const Problem& p) {
  const bool solves = p.routine == Routine::kTrsv || p.routine == Routine::kTrsm;
  return p.items > 1 ? p.routine == Routine::kGemm : solves && p.batch > 1;
}

cublas::cublasPointerMode_t pointer_mode(const Problem& p) {
  const bool device = p.routine <= Routine::kDot || p.scalar_args;  // Up to dot, of the result.
  return device ? cublas::CUBLAS_POINTER_MODE_DEVICE : cublas::CUBLAS_POINTER_MODE_HOST;
}

int math_mode(Math math) {
  switch (math) {
    case Math::kTF32: return cublas::CUBLAS_TF32_TENSOR_OP_MATH;
    case Math::kPedantic: return cublas::CUBLAS_PEDANTIC_MATH;
    case Math::kNoReducedPrecision: return cublas::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    case Math::kDefault: break;
  }
  return cublas::CUBLAS_DEFAULT_MATH;
}

Status set_modes(const cublas::Api& api, cublas::cublasHandle_t handle, const Problem& p, cudaStream_t stream,
                 char* workspace, int64_t workspace_bytes) {
  const auto check = [&](cublas::cublasStatus_t status, const char* function) {
    return cublas::to_status(api, status, std::string(function) + " for " + blas::describe(p));
  };
  // The stream first: setting it takes the workspace away.
  Status s = check(api.cublasSetStream_v2(handle, stream), "cublasSetStream");
  if (s.is_ok()) {
    s = check(api.cublasSetWorkspace_v2(handle, workspace, static_cast<size_t>(workspace_bytes)), "cublasSetWorkspace");
  }
  if (s.is_ok()) s = check(api.cublasSetPointerMode_v2(handle, pointer_mode(p)), "cublasSetPointerMode");
  if (s.is_ok()) {
    const auto atomics = p.atomics ? cublas::CUBLAS_ATOMICS_ALLOWED : cublas::CUBLAS_ATOMICS_NOT_ALLOWED;
    s = check(api.cublasSetAtomicsMode(handle, atomics), "cublasSetAtomicsMode");
  }
  if (s.is_ok()) s = check(api.cublasSetMathMode(handle, math_mode(p.math)), "cublasSetMathMode");
  return s;
}

// What is updated in place starts as a copy of c where XLA has not put both in one place; and where there is no
// c, as zeros if cuBLAS is to multiply it by a beta that only the device knows.
Status copy_c(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  for (size_t i = 0; i < buffers.c.size(); ++i) {
    if (buffers.c[i] == buffers.d[i]) continue;
    const auto bytes = static_cast<size_t>(buffers.c_bytes[i]);
    const auto error = cudaMemcpyAsync(buffers.d[i], buffers.c[i], bytes, cudaMemcpyDeviceToDevice, stream);
    if (Status s = cuda_status(error, "cudaMemcpyAsync"); !s.is_ok()) return s;
  }
  if (p.has_c || !p.scalar_args) return Status::ok();
  const auto bytes = static_cast<size_t>(blas::required_elements_c(p) * dtype_bytes(p.dtype));
  for (void* d : buffers.d) {
    if (Status s = cuda_status(cudaMemsetAsync(d, 0, bytes, stream), "cudaMemsetAsync"); !s.is_ok()) return s;
  }
  return Status::ok();
}

class Cublas final : public blas::Implementation {
 public:
  const char* name() const override { return "cublas"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> configs{"default"};
    return configs;
  }

  Features features() const override {
    return {Feature::kAlpha, Feature::kBeta, Feature::kScalarArgs, Feature::kItems};
  }

  std::string reject_rest(const Problem& p, const Device&, std::string_view) const override {
    if (cublas::api() == nullptr) {
      return "cuBLAS was not found: neither loaded by JAX nor among the CUDA packages; pip install 'jax[cuda13]'";
    }
    const bool is_half = p.dtype == DType::kF16 || p.dtype == DType::kBF16;
    if (is_half && (p.routine == Routine::kAsum || p.routine == Routine::kGbmv || p.routine == Routine::kTrsv ||
                    p.routine == Routine::kTrsm)) {
      return std::string("cuBLAS has no ") + name_of(p.routine) + " of " + name_of(p.dtype);
    }
    return "";
  }

  // Besides what the caller grants cuBLAS itself.
  int64_t workspace_bytes(const Problem& p, const Device&, std::string_view) const override {
    const int64_t arrays = p.routine == Routine::kGemm ? 3 : 2;
    const int64_t pointers = needs_pointers(p) ? arrays * p.items * p.batch : 0;
    return kAlignment + round_up(pointers * static_cast<int64_t>(sizeof(void*)));
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view) const override {
    if (!needs_pointers(p)) return {};
    return {cublas::fill_pointers_source(device)};
  }

  Status launch(const Problem& given, const Buffers& given_buffers, const Device& device, std::string_view config,
                void* stream_handle) const override {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const cublas::Api& api = *cublas::api();
    const RelaxedCapture relaxed;
    int ordinal = 0;
    if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
    const cublas::Lease lease(api, ordinal);
    if (!lease.status().is_ok()) return lease.status();
    if (Status s = copy_c(given, given_buffers, stream); !s.is_ok()) return s;

    const int64_t own_bytes = workspace_bytes(given, device, config);
    auto* const pointers = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(given_buffers.workspace)));
    char* const workspace = pointers + own_bytes - kAlignment;
    Problem p = given;
    Buffers buffers = given_buffers;
    blas::fold_batch(&p, &buffers);
    rename(&p);
    if (Status s = set_modes(api, lease.handle(), p, stream, workspace, given_buffers.workspace_bytes - own_bytes);
        !s.is_ok()) {
      return s;
    }
    return cublas::run({api, lease.handle(), p, buffers, reinterpret_cast<const void**>(pointers), device, stream});
  }
};

}  // namespace

const blas::Implementation* cublas_blas() {
  static const Cublas implementation;
  return &implementation;
}

Status prepare_cublas() {
  const cublas::Api* api = cublas::api();
  if (api == nullptr) return Status::ok();  // The call itself says so.
  int ordinal = 0;
  if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
  return cublas::Lease(*api, ordinal).status();
}

}  // namespace tcgemm
