// The host implementation of core/blas.h: plain C++, one template for all types.
#pragma once

#include "core/blas.h"

namespace tcgemm {

// The `stream` of its launch() is a const Executor* (cpu/executor.h).
const blas::Implementation* host_blas();

// gemm, on the host GEMM.
Status host_blas_gemm(const blas::Problem& problem, const blas::Buffers& buffers, std::complex<double> alpha,
                      std::complex<double> beta, void* stream);

}  // namespace tcgemm
