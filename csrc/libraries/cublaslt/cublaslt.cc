// cuBLASLt as an Implementation.
//
// cuBLASLt is column-major and the problem row-major, so it is given the transposed product
//   D^T = op(B)^T op(A)^T,
// whose column-major matrices are the same bytes: its first operand X is our B, its second, Y,
// our A, and its row count is our n. Nothing is copied to be transposed, and its bias along rows is
// our bias along n.
#include "libraries/cublaslt/cublaslt.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/cuda_status.h"
#include "core/relaxed_capture.h"
#include "libraries/cublaslt/library.h"
#include "libraries/cublaslt/plan.h"

namespace tcgemm {
namespace {

using lt::PlanKey;

struct Supported {
  DType in, out;
  Compute compute;
  lt::Types types;
};

constexpr std::array<Supported, 11> kSupported{{
    {DType::kF16, DType::kF16, Compute::kF32, {CUDA_R_16F, CUDA_R_16F, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kF16, DType::kF32, Compute::kF32, {CUDA_R_16F, CUDA_R_32F, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kF16, DType::kF16, Compute::kF16, {CUDA_R_16F, CUDA_R_16F, CUDA_R_16F, lt::CUBLAS_COMPUTE_16F}},
    {DType::kBF16, DType::kBF16, Compute::kF32, {CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kBF16, DType::kF32, Compute::kF32, {CUDA_R_16BF, CUDA_R_32F, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kF32, DType::kF32, Compute::kF32, {CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kF32, DType::kF32, Compute::kTF32, {CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, lt::CUBLAS_COMPUTE_32F_FAST_TF32}},
    {DType::kF64, DType::kF64, Compute::kF64, {CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, lt::CUBLAS_COMPUTE_64F}},
    {DType::kC64, DType::kC64, Compute::kF32, {CUDA_C_32F, CUDA_C_32F, CUDA_C_32F, lt::CUBLAS_COMPUTE_32F}},
    {DType::kC64, DType::kC64, Compute::kTF32, {CUDA_C_32F, CUDA_C_32F, CUDA_C_32F, lt::CUBLAS_COMPUTE_32F_FAST_TF32}},
    {DType::kC128, DType::kC128, Compute::kF64, {CUDA_C_64F, CUDA_C_64F, CUDA_C_64F, lt::CUBLAS_COMPUTE_64F}},
}};

constexpr Supported kInt8{
    DType::kS8, DType::kS32, Compute::kS32, {CUDA_R_8I, CUDA_R_32I, CUDA_R_32I, lt::CUBLAS_COMPUTE_32I}};

const lt::Types* find_types(const Problem& p) {
  const auto matches = [&](const Supported& s) {
    return p.a.dtype == s.in && p.b.dtype == s.in && p.out == s.out && p.compute == s.compute;
  };
  for (const Supported& s : kSupported) {
    if (matches(s)) return &s.types;
  }
  return matches(kInt8) ? &kInt8.types : nullptr;
}

std::string describe_types(const Problem& p) {
  return std::string(name_of(p.a.dtype)) + " x " + name_of(p.b.dtype) + " -> " + name_of(p.out) + " accumulated in " +
         name_of(p.compute);
}

std::string describe(const Problem& p) {
  return describe_types(p) + ", " + (p.a.transposed ? "T" : "N") + (p.b.transposed ? "T" : "N") +
         ", batch=" + std::to_string(p.batch) + " m=" + std::to_string(p.m) + " n=" + std::to_string(p.n) +
         " k=" + std::to_string(p.k) + " lda=" + std::to_string(p.a.ld) + " ldb=" + std::to_string(p.b.ld);
}

// "Regular" integer kernels want X transposed, Y not, and 4-byte alignment everywhere:
// https://docs.nvidia.com/cuda/cublas/#cublasltmatmul
std::string reject_int8(const Problem& p) {
  if (p.a.transposed || !p.b.transposed) return "s8 needs the layout NT (a not transposed, b transposed)";
  for (const auto& [name, value] : {std::pair{"n", p.n},
                                    {"k", p.k},
                                    {"lda", p.a.ld},
                                    {"ldb", p.b.ld},
                                    {"a's batch stride", p.a.batch_inner_stride},
                                    {"a's batch stride", p.a.batch_outer_stride},
                                    {"b's batch stride", p.b.batch_inner_stride},
                                    {"b's batch stride", p.b.batch_outer_stride}}) {
    if (value % 4 != 0) return std::string("s8 needs ") + name + " to be a multiple of 4, got " + std::to_string(value);
  }
  for (double scale : {p.alpha, p.beta}) {
    if (scale != std::nearbyint(scale) || std::abs(scale) > std::numeric_limits<int32_t>::max()) {
      return "s8 needs alpha and beta to be 32-bit integers, got " + std::to_string(scale);
    }
  }
  return "";
}

// The library's own epilogue that a function is. Its relu with aux leaves a bit mask behind, which is not ours.
lt::cublasLtEpilogue_t epilogue_of(const Problem& p) {
  switch (p.epilogue.function.library) {
    case LibraryEpilogue::kBias: return lt::CUBLASLT_EPILOGUE_BIAS;
    case LibraryEpilogue::kRelu: return lt::CUBLASLT_EPILOGUE_RELU;
    case LibraryEpilogue::kReluBias: return lt::CUBLASLT_EPILOGUE_RELU_BIAS;
    case LibraryEpilogue::kGelu: return lt::CUBLASLT_EPILOGUE_GELU;
    case LibraryEpilogue::kGeluBias: return lt::CUBLASLT_EPILOGUE_GELU_BIAS;
    case LibraryEpilogue::kGeluAux: return lt::CUBLASLT_EPILOGUE_GELU_AUX;
    case LibraryEpilogue::kGeluAuxBias: return lt::CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case LibraryEpilogue::kDGelu: return lt::CUBLASLT_EPILOGUE_DGELU;
    default: return lt::CUBLASLT_EPILOGUE_DEFAULT;
  }
}

bool is_derivative(const Problem& p) { return p.epilogue.function.library == LibraryEpilogue::kDGelu; }

bool has_aux_out(const Problem& p) {
  const LibraryEpilogue x = p.epilogue.function.library;
  return x == LibraryEpilogue::kGeluAux || x == LibraryEpilogue::kGeluAuxBias;
}

bool has_bias(const Problem& p) {
  const LibraryEpilogue x = p.epilogue.function.library;
  return x == LibraryEpilogue::kBias || x == LibraryEpilogue::kReluBias || x == LibraryEpilogue::kGeluBias ||
         x == LibraryEpilogue::kGeluAuxBias;
}

// Whether the function's arrays are such as the library takes: of rows a vector, or a matrix as D.
bool has_arrays(const Problem& p) {
  const Function& f = p.epilogue.function;
  if (f.num_reads() != (has_bias(p) || is_derivative(p)) || f.num_results() != 1 + has_aux_out(p)) return false;
  const int64_t bytes = dtype_bytes(p.out);
  for (int64_t i = 0; i < f.num_results(); ++i) {
    if (f.result(i).form != Function::Form::kWhole || f.result(i).bytes != bytes) return false;
  }
  if (f.num_reads() == 0) return true;
  const Function::Read x = f.read(0);
  const int64_t row = is_derivative(p) ? p.n : 0;
  const bool are_rows = p.m <= 1 || (x.m_inner == row && (x.period >= p.m || x.m_outer == row * x.period));
  return x.bytes == bytes && x.offset == 0 && are_rows && (x.n == 1 || p.n <= 1);
}

std::string reject_epilogue(const Problem& p) {
  if (p.epilogue.is_none()) return "";
  if (epilogue_of(p) == lt::CUBLASLT_EPILOGUE_DEFAULT || !has_arrays(p)) {
    return "of functions it has a bias along n, relu and gelu by tanh with it, that gelu with what it is of, and its "
           "derivative";
  }
  if (p.a.dtype != p.out) return std::string("an epilogue needs d of the dtype of a, got ") + name_of(p.out);
  if (p.a.dtype != DType::kF16 && p.a.dtype != DType::kBF16) return "an epilogue needs f16 or bf16";
  if (p.compute != Compute::kF32) return "an epilogue needs the accumulator f32";
  if (p.batch != 1) return "an epilogue needs a batch of 1, got " + std::to_string(p.batch);
  if (p.k == 0) return "an epilogue needs k to be at least 1";
  if ((has_aux_out(p) || is_derivative(p)) && p.n % 8 != 0) return "aux needs n to be a multiple of 8";
  return "";
}

lt::EpilogueAddresses addresses_of(const Problem& p, const Buffers& buffers) {
  void* const operand = buffers.function_operands.empty() ? nullptr : buffers.function_operands[0].data;
  void* const aux_out = has_aux_out(p) ? buffers.more_results[0].data : nullptr;
  return {has_bias(p) ? operand : nullptr, is_derivative(p) ? operand : aux_out};
}

// alpha or beta in the scale type, as cublasLtMatmul reads it from host memory.
struct Scale {
  alignas(16) unsigned char bytes[16] = {};

  Scale(double value, cudaDataType_t type) {
    switch (type) {
      case CUDA_R_16F: store(__double2half(value)); break;
      case CUDA_R_32F:
      case CUDA_C_32F: store(static_cast<float>(value)); break;  // Imaginary part 0.
      case CUDA_R_32I: store(static_cast<int32_t>(value)); break;
      default: store(value); break;
    }
  }

  template <typename T>
  void store(T value) {
    std::memcpy(bytes, &value, sizeof(value));
  }
};

// A batch level as cuBLASLt takes it: `count` products, each matrix advancing by its stride.
struct Level {
  int64_t count, a_stride, b_stride, d_stride;
};

struct Levels {
  Level strided, looped;
};

// cuBLASLt strides over one level only. Two that do not fold into one become a loop of launches
// over the shorter.
Levels batch_levels(const Problem& p) {
  const int64_t d_stride = p.m * p.n;
  const Level inner{p.batch_inner, p.a.batch_inner_stride, p.b.batch_inner_stride, d_stride};
  const Level outer{p.batch_outer(), p.a.batch_outer_stride, p.b.batch_outer_stride, d_stride * p.batch_inner};
  const Level once{1, 0, 0, 0};
  if (p.batch == 1) return {once, once};
  if (inner.count == 1) return {outer, once};
  const bool folds = outer.a_stride == inner.a_stride * inner.count && outer.b_stride == inner.b_stride * inner.count;
  if (outer.count == 1 || folds) return {{p.batch, inner.a_stride, inner.b_stride, inner.d_stride}, once};
  return inner.count >= outer.count ? Levels{inner, outer} : Levels{outer, inner};
}

// The largest power of two up to 16 that divides the address. Kernels ask for no more, and every
// buffer of XLA has it, so that the algorithm never depends on where a buffer happens to lie.
int64_t alignment(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 16;
  return static_cast<int64_t>(address & (~address + 1));
}

const void* advance(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * dtype_bytes(dtype);
}
void* advance(void* base, int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * dtype_bytes(dtype);
}

// K = 0: the sum is empty, D = beta * C.
Status launch_empty_sum(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(p.batch * p.m * p.n * dtype_bytes(p.out));
  if (p.beta == 0.0) return cuda_status(cudaMemsetAsync(buffers.d, 0, bytes, stream), "cudaMemsetAsync");
  if (buffers.c == buffers.d) return Status::ok();
  return cuda_status(cudaMemcpyAsync(buffers.d, buffers.c, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

class CublasLt final : public Implementation {
 public:
  const char* name() const override { return "cublaslt"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> all = [] {
      std::vector<std::string> names;
      for (int rank = 0; rank < lt::kMaxAlgorithms; ++rank) names.push_back("heuristic" + std::to_string(rank));
      return names;
    }();
    return all;
  }

  Features features() const override { return {Feature::kAlpha, Feature::kBeta, Feature::kFunction}; }

  std::string reject_rest(const Problem& p, const Device&, std::string_view) const override {
    if (lt::api() == nullptr) {
      return "cuBLASLt was not found: neither loaded by JAX nor among the CUDA packages; pip install 'jax[cuda13]'";
    }
    const lt::Types* types = find_types(p);
    if (types == nullptr) return "cuBLASLt has no " + describe_types(p);
    if (std::string reason = reject_epilogue(p); !reason.empty()) return reason;
    if (p.k == 0 && p.beta != 0.0 && p.beta != 1.0) return "k must be at least 1 when beta is neither 0 nor 1";
    return types == &kInt8.types ? reject_int8(p) : "";
  }

  // What XLA gives cuBLASLt; Hopper's kernels use more than the ones before.
  int64_t workspace_bytes(const Problem& p, const Device& device, std::string_view) const override {
    if (p.is_empty() || p.k == 0) return 0;
    return device.compute_capability >= 90 ? int64_t{32} << 20 : int64_t{4} << 20;
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view config,
                void* stream_handle) const override {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    if (p.k == 0) return launch_empty_sum(p, buffers, stream);

    const int rank = config.back() - '0';  // The configs are heuristic0 to heuristic7.
    const lt::Api& api = *lt::api();
    const lt::Types& types = *find_types(p);
    const Scale alpha(p.alpha, types.scale), beta(p.beta, types.scale);
    const RelaxedCapture relaxed;
    int ordinal = 0;
    if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
    lt::cublasLtHandle_t handle = nullptr;
    if (Status s = lt::device_handle(api, ordinal, &handle); !s.is_ok()) return s;

    const lt::EpilogueAddresses addresses = addresses_of(p, buffers);
    // A batch count is a grid dimension in many kernels, with the limit of one.
    constexpr int64_t kMaxBatch = 65535;
    const auto [strided, looped] = batch_levels(p);
    for (int64_t loop_idx = 0; loop_idx < looped.count; ++loop_idx) {
      for (int64_t first = 0; first < strided.count; first += kMaxBatch) {
        const auto offset = [&](int64_t Level::* stride) {
          return loop_idx * looped.*stride + first * strided.*stride;
        };
        const void* a = advance(buffers.a, offset(&Level::a_stride), p.a.dtype);
        const void* b = advance(buffers.b, offset(&Level::b_stride), p.b.dtype);
        void* d = advance(buffers.d, offset(&Level::d_stride), p.out);
        // C must be a valid address even where beta == 0 says that it is not read.
        const void* c = p.beta == 0.0 ? d : advance(buffers.c, offset(&Level::d_stride), p.out);
        const PlanKey key{ordinal,
                          types,
                          p.b.transposed ? lt::CUBLAS_OP_T : lt::CUBLAS_OP_N,
                          p.a.transposed ? lt::CUBLAS_OP_T : lt::CUBLAS_OP_N,
                          p.n,
                          p.m,
                          p.k,
                          p.b.ld,
                          p.a.ld,
                          std::min(kMaxBatch, strided.count - first),
                          strided.b_stride,
                          strided.a_stride,
                          strided.d_stride,
                          alignment(b),
                          alignment(a),
                          alignment(c),
                          alignment(d),
                          buffers.workspace_bytes,
                          epilogue_of(p),
                          alignment(addresses.bias),
                          alignment(addresses.aux)};
        std::shared_ptr<const lt::Plan> plan;
        if (Status s = lt::find_plan(api, handle, key, addresses, &plan); !s.is_ok()) {
          s.message += " for " + describe(p);
          return s;
        }
        if (rank >= plan->num_algorithms()) {
          return Status::invalid("config " + std::string(config) + " does not exist for " + describe(p) +
                                 ": cuBLASLt proposes " + std::to_string(plan->num_algorithms()) + " algorithms");
        }
        if (Status s =
                plan->run(handle, key, rank, alpha.bytes, b, a, beta.bytes, c, d, addresses, buffers.workspace, stream);
            !s.is_ok()) {
          s.message += " for " + describe(p);
          return s;
        }
      }
    }
    return Status::ok();
  }
};

}  // namespace

const Implementation* cublaslt() {
  static const CublasLt implementation;
  return &implementation;
}

}  // namespace tcgemm
