// What the bodies of the FFI handlers share: checks of the buffers, and the last steps of a call.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "core/implementation.h"
#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// Part of every call, because the compilation cache keys on attributes and not on this
// library: raised whenever the meaning of an attribute changes.
inline constexpr int64_t kAbiVersion = 2;

inline std::string check_abi(int64_t abi) {
  if (abi == kAbiVersion) return "";
  return "the program was lowered for ABI version " + std::to_string(abi) + ", this library has version " +
         std::to_string(kAbiVersion) + "; lower it again";
}

inline xla::ffi::Error invalid(const std::string& message) {
  return xla::ffi::Error::InvalidArgument("jax_tcgemm: " + message);
}

// What became of a launch; `name` says whose.
inline xla::ffi::Error to_ffi_error(const std::string& name, const Status& status) {
  switch (status.code) {
    case Status::Code::kOk: return xla::ffi::Error::Success();
    case Status::Code::kInvalidArgument: return invalid(name + ": " + status.message);
    case Status::Code::kInternal: break;
  }
  return xla::ffi::Error::Internal("jax_tcgemm: " + name + ": " + status.message);
}

// False for types that no implementation knows.
bool from_xla(xla::ffi::DataType type, DType* out);

// Checks that `buffer` has a dtype we know and at least `elements` elements.
std::string check_buffer(std::string_view name, const xla::ffi::AnyBuffer& buffer, int64_t elements, DType* dtype);

// The rest of a call whose problem and buffers have been checked: finds the implementation, asks it,
// checks its workspace, launches.
template <typename Problem, typename Buffers>
xla::ffi::Error launch_checked(const ImplementationsOf<Problem, Buffers>& implementations, const Problem& problem,
                               const Buffers& buffers, const Device& device, std::string_view implementation_name,
                               std::string_view config, void* stream) {
  namespace ffi = xla::ffi;
  const auto* implementation = find_implementation(implementations, implementation_name);
  if (implementation == nullptr) {
    return invalid("implementation " + std::string(implementation_name) + " is not part of this build");
  }
  const std::string name = implementation->name();
  if (!implementation->has_config(config)) return invalid(name + " has no config " + std::string(config));
  if (std::string reason = implementation->reject(problem, device, config); !reason.empty()) {
    return invalid(name + " cannot run this: " + reason);
  }
  const int64_t workspace_bytes = implementation->workspace_bytes(problem, device, config);
  if (buffers.workspace_bytes < workspace_bytes) {
    return invalid("workspace of " + name + " must hold " + std::to_string(workspace_bytes) + " bytes, got " +
                   std::to_string(buffers.workspace_bytes));
  }
  if (problem.is_empty()) return ffi::Error::Success();

  return to_ffi_error(name, implementation->launch(problem, buffers, device, config, stream));
}

// Nothing may throw across the FFI.
template <typename Body>
xla::ffi::Error without_exceptions(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(std::string("jax_tcgemm: ") + error.what());
  }
}

// A handler for the FFI that does what `body` does.
template <typename... Arguments>
auto guarded(xla::ffi::Error (*body)(Arguments...)) {
  return [body](Arguments... arguments) { return without_exceptions([&] { return body(arguments...); }); };
}

}  // namespace tcgemm
