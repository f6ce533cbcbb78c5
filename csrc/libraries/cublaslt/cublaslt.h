// cuBLASLt behind the common interface, opened at run time.
#pragma once

#include <string>

#include "core/implementation.h"

namespace tcgemm {

const Implementation* cublaslt();

// Opens the library from `path` unless the process already has it; "" when it is usable, else why not.
std::string load_cublaslt(const std::string& path);

}  // namespace tcgemm
