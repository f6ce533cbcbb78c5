// cuBLAS behind the interface of BLAS calls, opened at run time.
#pragma once

#include <string>

#include "core/blas.h"

namespace tcgemm {

const blas::Implementation* cublas_blas();

// Opens the library from `path` unless the process already has it; "" when it is usable, else why not.
std::string load_cublas(const std::string& path);

// Such as "13.0.2"; "not loaded" without a library.
std::string cublas_version();

// Writes cuBLAS's log to a file, "stdout" or "stderr"; "" turns it off.
Status set_cublas_logging(const std::string& path);

// Makes sure that the calling thread's device has a handle, since a later call may be captured into
// a graph.
Status prepare_cublas();

}  // namespace tcgemm
