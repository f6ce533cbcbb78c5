#include "libraries/cublaslt/library.h"

#include <array>
#include <atomic>
#include <mutex>

#include "libraries/cublaslt/cublaslt.h"
#include "libraries/shared_library.h"

namespace tcgemm {
namespace lt {

std::string Api::resolve_all(const SharedLibrary& library) {
  TCGEMM_RESOLVE(cublasLtGetVersion);
  TCGEMM_RESOLVE(cublasLtGetStatusName);
  TCGEMM_RESOLVE(cublasLtCreate);
  TCGEMM_RESOLVE(cublasLtMatmulDescCreate);
  TCGEMM_RESOLVE(cublasLtMatmulDescSetAttribute);
  TCGEMM_RESOLVE(cublasLtMatmulDescDestroy);
  TCGEMM_RESOLVE(cublasLtMatrixLayoutCreate);
  TCGEMM_RESOLVE(cublasLtMatrixLayoutSetAttribute);
  TCGEMM_RESOLVE(cublasLtMatrixLayoutDestroy);
  TCGEMM_RESOLVE(cublasLtMatmulPreferenceCreate);
  TCGEMM_RESOLVE(cublasLtMatmulPreferenceSetAttribute);
  TCGEMM_RESOLVE(cublasLtMatmulPreferenceDestroy);
  TCGEMM_RESOLVE(cublasLtMatmulAlgoGetHeuristic);
  TCGEMM_RESOLVE(cublasLtMatmul);
  return "";
}

const Api* api() { return LoadedLibrary<Api>::api(); }

Status device_handle(const Api& api, int ordinal, cublasLtHandle_t* handle) {
  constexpr int kMaxDevices = 64;
  // Never destroyed: at process exit the CUDA context may be gone before this library is.
  static std::array<std::atomic<cublasLtHandle_t>, kMaxDevices> handles{};
  static std::mutex mutex;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return Status::internal("device ordinal " + std::to_string(ordinal) + " is over 63");
  }
  *handle = handles[ordinal].load(std::memory_order_acquire);
  if (*handle != nullptr) return Status::ok();
  std::lock_guard<std::mutex> lock(mutex);
  *handle = handles[ordinal].load(std::memory_order_relaxed);
  if (*handle != nullptr) return Status::ok();
  const Status status =
      to_status(api, api.cublasLtCreate(handle), "cublasLtCreate on device " + std::to_string(ordinal));
  if (status.is_ok()) handles[ordinal].store(*handle, std::memory_order_release);
  return status;
}

Status to_status(const Api& api, cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return Status::ok();
  const std::string message = what + " failed: " + api.cublasLtGetStatusName(status) + " (cuBLASLt " +
                              std::to_string(api.cublasLtGetVersion()) + ")";
  return status == CUBLAS_STATUS_NOT_SUPPORTED ? Status::invalid(message) : Status::internal(message);
}

}  // namespace lt

std::string load_cublaslt(const std::string& path) { return LoadedLibrary<lt::Api>::open(path.c_str()); }

}  // namespace tcgemm
