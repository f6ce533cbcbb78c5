#include "libraries/cublaslt/plan.h"

#include <mutex>
#include <unordered_map>

#include "libraries/cublaslt/library.h"

namespace tcgemm::lt {
namespace {

// Deletes the preference when a build ends, whichever way.
struct PreferenceDeleter {
  const Api* api;
  void operator()(cublasLtMatmulPreference_t preference) const { api->cublasLtMatmulPreferenceDestroy(preference); }
};

Status make_layout(const Api& api, cudaDataType_t type, int64_t rows, int64_t columns, int64_t ld, int64_t batch,
                   int64_t stride, cublasLtMatrixLayout_t* layout) {
  const std::string shape = std::to_string(rows) + "x" + std::to_string(columns) + ", ld " + std::to_string(ld);
  Status status = to_status(api, api.cublasLtMatrixLayoutCreate(layout, type, rows, columns, ld),
                            "cublasLtMatrixLayoutCreate(" + shape + ")");
  if (!status.is_ok()) return status;
  const int32_t count = static_cast<int32_t>(batch);
  status = to_status(
      api, api.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
      "setting batch count " + std::to_string(batch));
  if (!status.is_ok()) return status;
  return to_status(api,
                   api.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                        sizeof(stride)),
                   "setting batch stride " + std::to_string(stride));
}

// The description of a product, with the addresses of its epilogue.
Status make_desc(const Api& api, const PlanKey& key, const EpilogueAddresses& addresses, cublasLtMatmulDesc_t* desc) {
  Status status = to_status(api, api.cublasLtMatmulDescCreate(desc, key.types.compute, key.types.scale),
                            "cublasLtMatmulDescCreate");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    if (!status.is_ok()) return;
    status = to_status(api, api.cublasLtMatmulDescSetAttribute(*desc, attribute, &value, sizeof(value)),
                       "setting matmul attribute " + std::to_string(attribute));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, key.op_x);
  set(CUBLASLT_MATMUL_DESC_TRANSB, key.op_y);
  if (key.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return status;
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
  if (addresses.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, addresses.bias);
  if (addresses.aux != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, addresses.aux);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
  }
  return status;
}

}  // namespace

Plan::~Plan() {
  if (desc_ != nullptr) api_.cublasLtMatmulDescDestroy(desc_);
  for (cublasLtMatrixLayout_t layout : {x_layout_, y_layout_, d_layout_}) {
    if (layout != nullptr) api_.cublasLtMatrixLayoutDestroy(layout);
  }
}

Status Plan::run(cublasLtHandle_t handle, const PlanKey& key, int rank, const void* alpha, const void* x, const void* y,
                 const void* beta, const void* c, void* d, const EpilogueAddresses& addresses, void* workspace,
                 cudaStream_t stream) const {
  // One description serves all threads unless it holds this call's addresses.
  cublasLtMatmulDesc_t own = nullptr;
  Status status = Status::ok();
  if (key.epilogue != CUBLASLT_EPILOGUE_DEFAULT) status = make_desc(api_, key, addresses, &own);
  if (status.is_ok()) {
    status = to_status(
        api_,
        api_.cublasLtMatmul(handle, own != nullptr ? own : desc_, alpha, x, x_layout_, y, y_layout_, beta, c, d_layout_,
                            d, d_layout_, &algorithms_[rank], workspace, key.workspace_bytes, stream),
        "cublasLtMatmul");
  }
  if (own != nullptr) api_.cublasLtMatmulDescDestroy(own);
  return status;
}

Status Plan::build(cublasLtHandle_t handle, const PlanKey& key, const EpilogueAddresses& addresses) {
  Status status = make_desc(api_, key, addresses, &desc_);
  if (!status.is_ok()) return status;
  const bool x_flipped = key.op_x == CUBLAS_OP_T, y_flipped = key.op_y == CUBLAS_OP_T;
  status = make_layout(api_, key.types.in, x_flipped ? key.k : key.n, x_flipped ? key.n : key.k, key.ld_x, key.batch,
                       key.stride_x, &x_layout_);
  if (!status.is_ok()) return status;
  status = make_layout(api_, key.types.in, y_flipped ? key.m : key.k, y_flipped ? key.k : key.m, key.ld_y, key.batch,
                       key.stride_y, &y_layout_);
  if (!status.is_ok()) return status;
  status = make_layout(api_, key.types.out, key.n, key.m, key.n, key.batch, key.stride_d, &d_layout_);
  if (!status.is_ok()) return status;

  cublasLtMatmulPreference_t raw_preference = nullptr;
  status = to_status(api_, api_.cublasLtMatmulPreferenceCreate(&raw_preference), "cublasLtMatmulPreferenceCreate");
  if (!status.is_ok()) return status;
  const std::unique_ptr<cublasLtMatmulPreference, PreferenceDeleter> preference(raw_preference, {&api_});
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (!status.is_ok()) return;
    status =
        to_status(api_, api_.cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
                  "setting matmul preference " + std::to_string(attribute) + " to " + std::to_string(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(key.workspace_bytes));
  // Split-K partial sums stay in the accumulator's type and are added in a fixed order by a
  // second pass. The two other schemes round them to the output's type.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_x));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_y));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));
  if (!status.is_ok()) return status;

  std::array<cublasLtMatmulHeuristicResult_t, kMaxAlgorithms> results{};
  int returned = 0;
  status = to_status(api_,
                     api_.cublasLtMatmulAlgoGetHeuristic(handle, desc_, x_layout_, y_layout_, d_layout_, d_layout_,
                                                         preference.get(), kMaxAlgorithms, results.data(), &returned),
                     "cublasLtMatmulAlgoGetHeuristic");
  if (!status.is_ok()) return status;
  for (int i = 0; i < returned; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms_.push_back(results[i].algo);
  }
  return Status::ok();
}

Status find_plan(const Api& api, cublasLtHandle_t handle, const PlanKey& key, const EpilogueAddresses& addresses,
                 std::shared_ptr<const Plan>* plan) {
  struct Hash {
    size_t operator()(const PlanKey::Words& words) const {
      uint64_t hash = 0;
      for (int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u + (hash >> 29);
      return hash;
    }
  };
  // About a kilobyte a plan. A program with more shapes than this starts over, which costs it
  // one heuristic query a shape.
  constexpr size_t kMaxPlans = 4096;
  static auto& plans = *new std::unordered_map<PlanKey::Words, std::shared_ptr<const Plan>, Hash>();
  static std::mutex mutex;

  const PlanKey::Words words = key.words();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = plans.find(words); found != plans.end()) {
      *plan = found->second;
      return Status::ok();
    }
  }
  auto made = std::make_shared<Plan>(api);
  if (Status status = made->build(handle, key, addresses); !status.is_ok()) return status;
  std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() >= kMaxPlans) plans.clear();
  *plan = plans.emplace(words, std::move(made)).first->second;
  return Status::ok();
}

}  // namespace tcgemm::lt
