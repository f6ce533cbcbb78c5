// XLA FFI handlers that ask the GPU what tensor-core fragments hold (kernels/wmma/fragment_probe.h).
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "ffi/checks.h"
#include "kernels/wmma/fragment_probe.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// "tcgemm_fragment_probe": out, int32 [32, fragment size].
inline xla::ffi::Error fragment_probe(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                                      std::string_view operand, bool column_major,
                                      xla::ffi::Result<xla::ffi::Buffer<xla::ffi::S32>> out) {
  return to_ffi_error("fragment_probe",
                      wmma::launch_fragment_probe(shape, dtype, operand, column_major, out->typed_data(),
                                                  static_cast<int64_t>(out->element_count()), stream));
}

// "tcgemm_fragment_mma": a, b and d, int32 [32, fragment size].
inline xla::ffi::Error fragment_mma(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                                    std::string_view accumulator, xla::ffi::Buffer<xla::ffi::S32> a,
                                    xla::ffi::Buffer<xla::ffi::S32> b,
                                    xla::ffi::Result<xla::ffi::Buffer<xla::ffi::S32>> d) {
  const wmma::FragmentBuffers buffers{a.typed_data(),
                                      b.typed_data(),
                                      d->typed_data(),
                                      static_cast<int64_t>(a.element_count()),
                                      static_cast<int64_t>(b.element_count()),
                                      static_cast<int64_t>(d->element_count())};
  return to_ffi_error("fragment_mma", wmma::launch_fragment_mma(shape, dtype, accumulator, buffers, stream));
}

}  // namespace tcgemm
