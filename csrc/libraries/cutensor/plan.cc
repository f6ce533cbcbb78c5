#include "libraries/cutensor/plan.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/cuda_status.h"
#include "libraries/cutensor/library.h"

namespace tcgemm::cutensor {
namespace {

cudaDataType_t library_type(DType dtype) {
  switch (dtype) {
    case DType::kF16: return CUDA_R_16F;
    case DType::kBF16: return CUDA_R_16BF;
    case DType::kF32: return CUDA_R_32F;
    case DType::kF64: return CUDA_R_64F;
    case DType::kC64: return CUDA_C_32F;
    default: return CUDA_C_64F;
  }
}

std::string describe(const Operation& o) {
  std::string text = std::string(name_of(o.kind)) + " of " + name_of(o.dtype) + " in " + o.compute + ", extents";
  for (const int64_t extent : o.extents) text += " " + std::to_string(extent);
  return text;
}

// The descriptors of one operation, which the library frees when this goes.
class Descriptors {
 public:
  Descriptors(const Api& api, cutensorHandle_t handle) : api_(api), handle_(handle) {}
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() {
    if (preference_ != nullptr) api_.cutensorDestroyPlanPreference(preference_);
    if (operation_ != nullptr) api_.cutensorDestroyOperationDescriptor(operation_);
    for (cutensorTensorDescriptor_t tensor : {a_, b_, d_}) {
      if (tensor != nullptr) api_.cutensorDestroyTensorDescriptor(tensor);
    }
  }

  Status build(const Operation& o) {
    if (Status s = make_tensor(o, o.a_modes, &a_); !s.is_ok()) return s;
    if (Status s = make_tensor(o, o.b_modes, &b_); !s.is_ok()) return s;
    if (Status s = make_tensor(o, o.d_modes, &d_); !s.is_ok()) return s;
    if (Status s = make_operation(o); !s.is_ok()) return s;
    return to_status(
        api_,
        api_.cutensorCreatePlanPreference(handle_, &preference_, algorithm_number(o.algorithm), CUTENSOR_JIT_MODE_NONE),
        "cutensorCreatePlanPreference");
  }

  cutensorOperationDescriptor_t operation() const { return operation_; }
  cutensorPlanPreference_t preference() const { return preference_; }

 private:
  Status make_tensor(const Operation& o, const std::vector<int32_t>& modes, cutensorTensorDescriptor_t* tensor) {
    std::array<int64_t, Operation::kMaxModes> extents, strides;  // Addresses even of a scalar's.
    int64_t stride = 1;
    for (size_t i = modes.size(); i-- > 0;) {
      extents[i] = o.extents[modes[i]];
      strides[i] = stride;
      stride *= extents[i];
    }
    return to_status(
        api_,
        api_.cutensorCreateTensorDescriptor(handle_, tensor, static_cast<uint32_t>(modes.size()), extents.data(),
                                            strides.data(), library_type(o.dtype), kAlignment),
        "cutensorCreateTensorDescriptor for " + describe(o));
  }

  // C always has D's modes and layout, which is all that the library takes.
  Status make_operation(const Operation& o) {
    const cutensorComputeDescriptor_t compute = find_compute(api_, o.compute);
    if (compute == nullptr) return Status::invalid("this version of cuTENSOR has no compute type " + o.compute);
    // A scalar has no modes, but an address of them.
    const auto address = [](const std::vector<int32_t>& modes) {
      static constexpr int32_t kNone = 0;
      return modes.empty() ? &kNone : modes.data();
    };
    const int32_t *a = address(o.a_modes), *b = address(o.b_modes), *d = address(o.d_modes);
    const cutensorOperator_t a_op = operator_number(o.a_op), b_op = operator_number(o.b_op);
    const cutensorOperator_t c_op = operator_number(o.c_op), combine = operator_number(o.combine);
    const auto create = [&] {
      switch (o.kind) {
        case Kind::kContract:
          return api_.cutensorCreateContraction(handle_, &operation_, a_, a, a_op, b_, b, b_op, d_, d, c_op, d_, d,
                                                compute);
        case Kind::kPermute: return api_.cutensorCreatePermutation(handle_, &operation_, a_, a, a_op, d_, d, compute);
        case Kind::kElementwiseBinary:
          return api_.cutensorCreateElementwiseBinary(handle_, &operation_, a_, a, a_op, d_, d, c_op, d_, d, combine,
                                                      compute);
        case Kind::kElementwiseTrinary:
          return api_.cutensorCreateElementwiseTrinary(handle_, &operation_, a_, a, a_op, b_, b, b_op, d_, d, c_op, d_,
                                                       d, operator_number(o.combine_ab), combine, compute);
        case Kind::kReduce: break;
      }
      return api_.cutensorCreateReduction(handle_, &operation_, a_, a, a_op, d_, d, c_op, d_, d, combine, compute);
    };
    return to_status(api_, create(), "cuTENSOR's descriptor for " + describe(o));
  }

  const Api& api_;
  cutensorHandle_t handle_;
  cutensorTensorDescriptor_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  cutensorOperationDescriptor_t operation_ = nullptr;
  cutensorPlanPreference_t preference_ = nullptr;
};

// A scalar in the type that the operation reads it as, from host memory.
struct Scalar {
  alignas(16) unsigned char bytes[16] = {};

  Scalar(std::complex<double> value, cudaDataType_t type) {
    switch (type) {
      case CUDA_R_16F: store(__float2half(static_cast<float>(value.real()))); break;
      case CUDA_R_16BF: store(__float2bfloat16(static_cast<float>(value.real()))); break;
      case CUDA_R_32F: store(static_cast<float>(value.real())); break;
      case CUDA_R_64F: store(value.real()); break;
      case CUDA_C_32F: store(std::complex<float>(value)); break;
      default: store(value); break;
    }
  }

  template <typename T>
  void store(T value) {
    std::memcpy(bytes, &value, sizeof(value));
  }
};

// Everything that a plan depends on. Without iostreams: a module that has its own C++ runtime linked in shares the
// locale with that of other libraries in the process, and a stream then calls the wrong facet.
std::string plan_key(int ordinal, const Operation& o) {
  std::string key = std::string(name_of(o.kind)) + ' ' + name_of(o.dtype) + ' ' + o.compute + ' ' + o.algorithm;
  for (const std::string* name : {&o.a_op, &o.b_op, &o.c_op, &o.combine_ab, &o.combine}) key += ' ' + *name;
  const auto add = [&key](int64_t value) { key += ' ' + std::to_string(value); };
  add(ordinal);
  add(o.workspace_bytes);
  for (const int64_t extent : o.extents) add(extent);
  for (const auto* modes : {&o.a_modes, &o.b_modes, &o.d_modes}) {
    key += " |";
    for (const int32_t mode : *modes) add(mode);
  }
  return key;
}

// The least recently used plan is last in `order`.
struct PlanCache {
  struct Entry {
    std::string key;
    std::shared_ptr<const Plan> plan;
  };
  std::mutex mutex;
  std::list<Entry> order;
  std::unordered_map<std::string, std::list<Entry>::iterator> entries;
  int64_t hits = 0, misses = 0, evictions = 0;
};

// Never destroyed: at process exit the CUDA context may be gone before this library is.
PlanCache& plan_cache() {
  static PlanCache& cache = *new PlanCache;
  return cache;
}

Status current_handle(const Api** api, int* ordinal, cutensorHandle_t* handle) {
  *api = cutensor::api();
  if (*api == nullptr) {
    return Status::invalid("cuTENSOR was not found; pip install 'jax_tcgemm[cutensor]'");
  }
  if (Status s = cuda_status(cudaGetDevice(ordinal), "cudaGetDevice"); !s.is_ok()) return s;
  return device_handle(**api, *ordinal, handle);
}

}  // namespace

Plan::~Plan() {
  if (plan_ != nullptr) api_.cutensorDestroyPlan(plan_);
}

Status Plan::build(const Operation& operation) {
  Descriptors descriptors(api_, handle_);
  if (Status s = descriptors.build(operation); !s.is_ok()) return s;
  Status status = to_status(api_,
                            api_.cutensorOperationDescriptorGetAttribute(handle_, descriptors.operation(),
                                                                         CUTENSOR_OPERATION_DESCRIPTOR_SCALAR_TYPE,
                                                                         &scalar_type_, sizeof(scalar_type_)),
                            "reading cuTENSOR's scalar type");
  if (!status.is_ok()) return status;
  return to_status(api_,
                   api_.cutensorCreatePlan(handle_, &plan_, descriptors.operation(), descriptors.preference(),
                                           static_cast<uint64_t>(operation.workspace_bytes)),
                   "cutensorCreatePlan for " + describe(operation));
}

Status Plan::run(const Operation& o, const Buffers& buffers, cudaStream_t stream) const {
  const Scalar alpha(o.scalar(0), scalar_type_), beta(o.scalar(1), scalar_type_), gamma(o.scalar(2), scalar_type_);
  // C must be a valid address even where beta == 0 says that it is not read.
  const void* c = buffers.c == nullptr ? buffers.d : buffers.c;
  const auto workspace_bytes = static_cast<uint64_t>(o.workspace_bytes);
  const auto call = [&] {
    switch (o.kind) {
      case Kind::kContract:
        return api_.cutensorContract(handle_, plan_, alpha.bytes, buffers.a, buffers.b, beta.bytes, c, buffers.d,
                                     buffers.workspace, workspace_bytes, stream);
      case Kind::kPermute: return api_.cutensorPermute(handle_, plan_, alpha.bytes, buffers.a, buffers.d, stream);
      case Kind::kElementwiseBinary:
        return api_.cutensorElementwiseBinaryExecute(handle_, plan_, alpha.bytes, buffers.a, gamma.bytes, c, buffers.d,
                                                     stream);
      case Kind::kElementwiseTrinary:
        return api_.cutensorElementwiseTrinaryExecute(handle_, plan_, alpha.bytes, buffers.a, beta.bytes, buffers.b,
                                                      gamma.bytes, c, buffers.d, stream);
      case Kind::kReduce: break;
    }
    return api_.cutensorReduce(handle_, plan_, alpha.bytes, buffers.a, beta.bytes, c, buffers.d, buffers.workspace,
                               workspace_bytes, stream);
  };
  return to_status(api_, call(), "cuTENSOR's " + describe(o));
}

Status estimate_workspace(Operation operation, int64_t* bytes) {
  const Api* api;
  int ordinal;
  cutensorHandle_t handle;
  if (Status s = current_handle(&api, &ordinal, &handle); !s.is_ok()) return s;
  Descriptors descriptors(*api, handle);
  if (Status s = descriptors.build(operation); !s.is_ok()) return s;
  uint64_t estimate = 0;
  const Status status =
      to_status(*api,
                api->cutensorEstimateWorkspaceSize(handle, descriptors.operation(), descriptors.preference(),
                                                   CUTENSOR_WORKSPACE_DEFAULT, &estimate),
                "cutensorEstimateWorkspaceSize for " + describe(operation));
  if (!status.is_ok()) return status;
  *bytes = operation.workspace_bytes = static_cast<int64_t>(estimate);
  // Some of what is not supported shows only now.
  std::shared_ptr<const Plan> plan;
  return find_plan(ordinal, operation, &plan);
}

Status find_plan(int ordinal, const Operation& operation, std::shared_ptr<const Plan>* plan) {
  PlanCache& cache = plan_cache();
  const std::string key = plan_key(ordinal, operation);
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (const auto found = cache.entries.find(key); found != cache.entries.end()) {
      cache.order.splice(cache.order.begin(), cache.order, found->second);
      *plan = found->second->plan;
      ++cache.hits;
      return Status::ok();
    }
    ++cache.misses;
  }
  const Api* api;
  int current;
  cutensorHandle_t handle;
  if (Status s = current_handle(&api, &current, &handle); !s.is_ok()) return s;
  auto made = std::make_shared<Plan>(*api, handle);
  if (Status s = made->build(operation); !s.is_ok()) return s;
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (const auto found = cache.entries.find(key); found != cache.entries.end()) {
    *plan = found->second->plan;  // Another thread was faster.
    return Status::ok();
  }
  cache.order.push_front({key, std::move(made)});
  cache.entries[key] = cache.order.begin();
  *plan = cache.order.front().plan;
  if (cache.order.size() > kMaxPlans) {
    cache.entries.erase(cache.order.back().key);
    cache.order.pop_back();
    ++cache.evictions;
  }
  return Status::ok();
}

PlanCacheCounts plan_cache_counts() {
  PlanCache& cache = plan_cache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  return {cache.hits, cache.misses, cache.evictions, static_cast<int64_t>(cache.order.size())};
}

void clear_plan_cache() {
  PlanCache& cache = plan_cache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  cache.entries.clear();
  cache.order.clear();
  cache.hits = cache.misses = cache.evictions = 0;
}

}  // namespace tcgemm::cutensor
