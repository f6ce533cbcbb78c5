#include "ffi/checks.h"

namespace tcgemm {

namespace ffi = xla::ffi;

bool from_xla(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::DataType::F16: *out = DType::kF16; return true;
    case ffi::DataType::BF16: *out = DType::kBF16; return true;
    case ffi::DataType::F32: *out = DType::kF32; return true;
    case ffi::DataType::F64: *out = DType::kF64; return true;
    case ffi::DataType::S8: *out = DType::kS8; return true;
    case ffi::DataType::U8: *out = DType::kU8; return true;
    case ffi::DataType::S32: *out = DType::kS32; return true;
    case ffi::DataType::C64: *out = DType::kC64; return true;
    case ffi::DataType::C128: *out = DType::kC128; return true;
    default: return false;
  }
}

std::string check_buffer(std::string_view name, const ffi::AnyBuffer& buffer, int64_t elements, DType* dtype) {
  if (!from_xla(buffer.element_type(), dtype)) {
    return std::string(name) + " must have a supported dtype, got XLA type " +
           std::to_string(static_cast<int>(buffer.element_type()));
  }
  const int64_t got = static_cast<int64_t>(buffer.element_count());
  if (got < elements) {
    return std::string(name) + " must hold at least " + std::to_string(elements) + " elements, got " +
           std::to_string(got);
  }
  return "";
}

}  // namespace tcgemm
