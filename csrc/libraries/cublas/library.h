// The loaded cuBLAS of this process and its handles.
#pragma once

#include "core/implementation.h"
#include "libraries/cublas/api.h"

namespace tcgemm::cublas {

// The library that load_cublas() opened, or one that something else in the process has loaded
// since; null when there is neither. Once not null it stays the same and valid.
const Api* api();

// `what` names the call and its parameters. A problem the library does not support is the
// caller's error, everything else the library's.
Status to_status(const Api& api, cublasStatus_t status, const std::string& what);

// A handle for one call, from a pool that each device has. A handle is in the hands of one call at
// a time, which gives it the call's stream and workspace, so that calls on several streams and
// threads never share one. Handles are never destroyed: at process exit the CUDA context may be gone
// before this library is.
class Lease {
 public:
  // Of device `ordinal`, which must be the calling thread's. Creates a handle only when all are in
  // use; status() tells whether that worked.
  Lease(const Api& api, int ordinal);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  const Status& status() const { return status_; }
  cublasHandle_t handle() const { return handle_; }

 private:
  int ordinal_;
  cublasHandle_t handle_ = nullptr;
  Status status_;
};

}  // namespace tcgemm::cublas
