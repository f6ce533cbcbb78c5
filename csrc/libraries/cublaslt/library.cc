#include "libraries/cublaslt/library.h"

#include "libraries/cublaslt/cublaslt.h"
#include "libraries/device_handles.h"
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
  static DeviceHandles<cublasLtHandle_t> handles;
  const auto create = [&](cublasLtHandle_t* made) {
    return to_status(api, api.cublasLtCreate(made), "cublasLtCreate on device " + std::to_string(ordinal));
  };
  return handles.get(ordinal, create, handle);
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
