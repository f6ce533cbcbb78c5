#include "libraries/cublas/library.h"

#include <array>
#include <mutex>
#include <vector>

#include "libraries/cublas/cublas.h"
#include "libraries/shared_library.h"

namespace tcgemm {
namespace cublas {

std::string Api::resolve_all(const SharedLibrary& library) {
  TCGEMM_RESOLVE(cublasGetProperty);
  TCGEMM_RESOLVE(cublasGetStatusName);
  TCGEMM_RESOLVE(cublasLoggerConfigure);
  TCGEMM_RESOLVE(cublasCreate_v2);
  TCGEMM_RESOLVE(cublasSetStream_v2);
  TCGEMM_RESOLVE(cublasSetWorkspace_v2);
  TCGEMM_RESOLVE(cublasSetPointerMode_v2);
  TCGEMM_RESOLVE(cublasSetAtomicsMode);
  TCGEMM_RESOLVE(cublasSetMathMode);
  TCGEMM_RESOLVE(cublasIamaxEx);
  TCGEMM_RESOLVE(cublasIaminEx);
  TCGEMM_RESOLVE(cublasNrm2Ex);
  TCGEMM_RESOLVE(cublasDotEx);
  TCGEMM_RESOLVE(cublasDotcEx);
  TCGEMM_RESOLVE(cublasScalEx);
  TCGEMM_RESOLVE(cublasAxpyEx);
  TCGEMM_RESOLVE(cublasSwapEx);
  TCGEMM_RESOLVE(cublasGemmEx);
  TCGEMM_RESOLVE(cublasGemmStridedBatchedEx);
  TCGEMM_RESOLVE(cublasGemmBatchedEx);
  const auto resolve_types = [&](const char* suffix, auto* functions) -> std::string {
    constexpr std::array kTypes{"S", "D", "C", "Z", "HSH", "TST"};
    for (size_t i = 0; i < functions->size(); ++i) {
      const std::string name = std::string("cublas") + kTypes[i] + suffix;
      if (!library.resolve(name.c_str(), &(*functions)[i])) return name;
    }
    return "";
  };
  // Of complex vectors the name begins with the type of the result.
  constexpr std::array kAsum{"cublasSasum_v2", "cublasDasum_v2", "cublasScasum_v2", "cublasDzasum_v2"};
  for (size_t i = 0; i < kAsum.size(); ++i) {
    if (!library.resolve(kAsum[i], &asum[i])) return kAsum[i];
  }
  for (const std::string& missing :
       {resolve_types("gemv_v2", &gemv), resolve_types("gbmv_v2", &gbmv), resolve_types("trsv_v2", &trsv),
        resolve_types("trsm_v2", &trsm), resolve_types("trsmBatched", &trsm_batched),
        resolve_types("gemvStridedBatched", &gemv_strided_batched)}) {
    if (!missing.empty()) return missing;
  }
  return "";
}

const Api* api() { return LoadedLibrary<Api>::api(); }

Status to_status(const Api& api, cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return Status::ok();
  const std::string message =
      what + " failed: " + api.cublasGetStatusName(status) + " (cuBLAS " + cublas_version() + ")";
  const bool is_callers = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
  return is_callers ? Status::invalid(message) : Status::internal(message);
}

namespace {

struct Pool {
  std::mutex mutex;
  std::vector<cublasHandle_t> idle;
};

constexpr int kMaxDevices = 64;
std::array<Pool, kMaxDevices>& pools() {
  static auto* const all = new std::array<Pool, kMaxDevices>;
  return *all;
}

}  // namespace

Lease::Lease(const Api& api, int ordinal) : ordinal_(ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    status_ = Status::internal("device ordinal " + std::to_string(ordinal) + " is over 63");
    return;
  }
  Pool& pool = pools()[ordinal];
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    if (!pool.idle.empty()) {
      handle_ = pool.idle.back();
      pool.idle.pop_back();
      return;
    }
  }
  status_ = to_status(api, api.cublasCreate_v2(&handle_), "cublasCreate on device " + std::to_string(ordinal));
  if (!status_.is_ok()) handle_ = nullptr;
}

Lease::~Lease() {
  if (handle_ == nullptr) return;
  Pool& pool = pools()[ordinal_];
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.idle.push_back(handle_);
}

}  // namespace cublas

std::string load_cublas(const std::string& path) { return LoadedLibrary<cublas::Api>::open(path.c_str()); }

std::string cublas_version() {
  const cublas::Api* api = cublas::api();
  if (api == nullptr) return "not loaded";
  std::string version;
  for (libraryPropertyType part : {MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL}) {
    int value = 0;
    if (api->cublasGetProperty(part, &value) != cublas::CUBLAS_STATUS_SUCCESS) return "unknown";
    version += (version.empty() ? "" : ".") + std::to_string(value);
  }
  return version;
}

Status set_cublas_logging(const std::string& path) {
  const cublas::Api* api = cublas::api();
  if (api == nullptr) return Status::internal("cuBLAS is not loaded");
  const bool to_stdout = path == "stdout", to_stderr = path == "stderr";
  const char* file = path.empty() || to_stdout || to_stderr ? nullptr : path.c_str();
  return cublas::to_status(*api, api->cublasLoggerConfigure(!path.empty(), to_stdout, to_stderr, file),
                           "cublasLoggerConfigure to \"" + path + "\"");
}

}  // namespace tcgemm
