#include "libraries/cublaslt/library.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>

#include "libraries/cublaslt/cublaslt.h"

namespace tcgemm {
namespace lt {
namespace {

constexpr std::array kSonames{"libcublasLt.so.13", "libcublasLt.so.12"};

// Written once, before `loaded` is set.
Api loaded_api;
std::atomic<bool> loaded{false};

template <typename Function>
bool resolve(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The name of the first function that is missing; empty when all are there.
std::string resolve_all(void* library, Api* api) {
#define TCGEMM_RESOLVE(name) \
  if (!resolve(library, #name, &api->name)) return #name
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
#undef TCGEMM_RESOLVE
  return "";
}

// Opens cuBLASLt and keeps it. A library the process already has comes first, so that JAX and
// this module always share one; `path` may be null.
std::string open_library(const char* path) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded.load(std::memory_order_relaxed)) return "";
  void* library = nullptr;
  for (const char* soname : kSonames) {
    if (library == nullptr) library = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
  }
  if (library == nullptr && path == nullptr) return "it is not loaded";
  if (library == nullptr) library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  if (const std::string missing = resolve_all(library, &loaded_api); !missing.empty()) {
    return "the cuBLASLt found has no " + missing + "; version 12 or 13 is required";
  }
  loaded.store(true, std::memory_order_release);
  return "";
}

}  // namespace

const Api* api() {
  if (!loaded.load(std::memory_order_acquire) && !open_library(nullptr).empty()) return nullptr;
  return &loaded_api;
}

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

std::string load_cublaslt(const std::string& path) { return lt::open_library(path.c_str()); }

}  // namespace tcgemm
