// XLA FFI handlers that ask the GPU what tensor-core fragments hold (kernels/wmma/fragment_probe.h).
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <utility>

#include "ffi/checks.h"
#include "ffi/device.h"
#include "kernels/wmma/fragment_probe.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// What is wrong with a buffer of lanes' elements; "" for nothing. XLA's own check would look for the name of the type
// that it got, which not every type has.
inline std::string check_lanes(std::string_view name, const xla::ffi::AnyBuffer& buffer) {
  DType dtype;
  if (std::string error = check_buffer(name, buffer, 0, &dtype); !error.empty()) return error;
  return dtype == DType::kS32 ? "" : std::string(name) + " must have the dtype s32, got " + name_of(dtype);
}

// "tcgemm_fragment_probe": out, int32 [32, fragment size]; operands: the kernel that the program carries (kernel.h).
inline xla::ffi::Error fragment_probe(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                                      std::string_view operand, bool column_major,
                                      xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  if (std::string error = check_lanes("out", *out); !error.empty()) return invalid("fragment_probe: " + error);
  Device device;
  if (Status s = current_device(&device); !s.is_ok()) return to_ffi_error("fragment_probe", std::move(s));
  return to_ffi_error(
      "fragment_probe",
      wmma::launch_fragment_probe(shape, dtype, operand, column_major, static_cast<int32_t*>(out->untyped_data()),
                                  static_cast<int64_t>(out->element_count()), device, stream));
}

// "tcgemm_fragment_mma": a, b and d, int32 [32, fragment size]; after the operands the kernel.
inline xla::ffi::Error fragment_mma(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                                    std::string_view accumulator, xla::ffi::AnyBuffer a, xla::ffi::AnyBuffer b,
                                    xla::ffi::Result<xla::ffi::AnyBuffer> d) {
  for (const auto& [name, buffer] : {std::pair{"a", &a}, std::pair{"b", &b}, std::pair{"d", &*d}}) {
    if (std::string error = check_lanes(name, *buffer); !error.empty()) return invalid("fragment_mma: " + error);
  }
  Device device;
  if (Status s = current_device(&device); !s.is_ok()) return to_ffi_error("fragment_mma", std::move(s));
  const wmma::FragmentBuffers buffers{
      static_cast<const int32_t*>(a.untyped_data()), static_cast<const int32_t*>(b.untyped_data()),
      static_cast<int32_t*>(d->untyped_data()),      static_cast<int64_t>(a.element_count()),
      static_cast<int64_t>(b.element_count()),       static_cast<int64_t>(d->element_count())};
  return to_ffi_error("fragment_mma", wmma::launch_fragment_mma(shape, dtype, accumulator, buffers, device, stream));
}

}  // namespace tcgemm
