// What the bodies of the FFI handlers share: the ABI number, errors, checks of buffers.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>

#include "core/implementation.h"
#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// Part of every call, because the compilation cache keys on attributes and not on this
// library: raised whenever the meaning of an attribute changes.
inline constexpr int64_t kAbiVersion = 9;

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

// Whether elements of a type are whole bytes in memory; others are packed.
bool has_whole_bytes(xla::ffi::DataType type);

// Checks that `buffer` has a dtype we know and at least `elements` elements.
std::string check_buffer(std::string_view name, const xla::ffi::AnyBuffer& buffer, int64_t elements, DType* dtype);

// The same of a result, which must have exactly so many: no other would be written.
std::string check_result(std::string_view name, const xla::ffi::AnyBuffer& buffer, int64_t elements, DType* dtype);

// Checks that result `index` is bytes and says where they are; for a call that may have a workspace.
template <typename Buffers>
std::string take_workspace(const xla::ffi::RemainingRets& results, size_t index, Buffers* buffers) {
  auto workspace = results.get<xla::ffi::AnyBuffer>(index);
  if (workspace.has_error()) return "workspace must be a buffer";
  // Of other types, some are packed and have fewer bytes than elements.
  if ((*workspace)->element_type() != xla::ffi::DataType::U8) {
    return "workspace must be u8, got XLA type " + std::to_string(static_cast<int>((*workspace)->element_type()));
  }
  buffers->workspace = (*workspace)->untyped_data();
  buffers->workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  return "";
}

// Checks that no result overlaps an operand or another result, but for those that lie exactly where the
// operand lies that they replace: `replaces(operand, result)`, of their positions.
std::string check_overlaps(const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results,
                           const std::function<bool(size_t, size_t)>& replaces);
bool overlap(const xla::ffi::AnyBuffer& x, const xla::ffi::AnyBuffer& y);

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
