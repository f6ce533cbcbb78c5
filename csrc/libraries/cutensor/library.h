// The loaded cuTENSOR of this process and its handles.
#pragma once

#include <string>

#include "core/implementation.h"
#include "libraries/cutensor/api.h"

namespace tcgemm::cutensor {

// Opens the library from `path` unless the process already has it; "" when it is usable, else why not.
std::string load(const std::string& path);

// The library that load() opened; null when there is none. Once not null it stays the same and valid.
const Api* api();

// The handle of device `ordinal`, which must be the calling thread's; created on first use.
Status device_handle(const Api& api, int ordinal, cutensorHandle_t* handle);

// The compute type of that name; null where this version of the library does not have it.
cutensorComputeDescriptor_t find_compute(const Api& api, std::string_view name);

// `what` names the call and its parameters. An operation that the library does not support is the
// caller's error, everything else the library's.
Status to_status(const Api& api, cutensorStatus_t status, const std::string& what);

}  // namespace tcgemm::cutensor
