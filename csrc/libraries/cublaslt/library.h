// The loaded cuBLASLt of this process and its handles.
#pragma once

#include "core/implementation.h"
#include "libraries/cublaslt/api.h"

namespace tcgemm::lt {

// The library that load_cublaslt() opened, or one that something else in the process has loaded
// since; null when there is neither. Once not null it stays the same and valid.
const Api* api();

// The handle of device `ordinal`, which must be the calling thread's; created on first use.
Status device_handle(const Api& api, int ordinal, cublasLtHandle_t* handle);

// `what` names the call and its parameters. A problem the library does not support is the
// caller's error, everything else the library's.
Status to_status(const Api& api, cublasStatus_t status, const std::string& what);

}  // namespace tcgemm::lt
