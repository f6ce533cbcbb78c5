#include "ffi/checks.h"

#include <algorithm>
#include <vector>

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
    case ffi::DataType::F8E4M3FN: *out = DType::kF8E4M3FN; return true;
    case ffi::DataType::F8E5M2: *out = DType::kF8E5M2; return true;
    default: return false;
  }
}

bool has_whole_bytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
    case ffi::DataType::S8:
    case ffi::DataType::S16:
    case ffi::DataType::S32:
    case ffi::DataType::S64:
    case ffi::DataType::U8:
    case ffi::DataType::U16:
    case ffi::DataType::U32:
    case ffi::DataType::U64:
    case ffi::DataType::F16:
    case ffi::DataType::F32:
    case ffi::DataType::F64:
    case ffi::DataType::BF16:
    case ffi::DataType::C64:
    case ffi::DataType::C128:
    case ffi::DataType::F8E5M2:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E8M0FNU: return true;
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

std::string check_result(std::string_view name, const ffi::AnyBuffer& buffer, int64_t elements, DType* dtype) {
  if (std::string error = check_buffer(name, buffer, elements, dtype); !error.empty()) return error;
  if (const auto got = static_cast<int64_t>(buffer.element_count()); got != elements) {
    return std::string(name) + " must hold exactly " + std::to_string(elements) + " elements, got " +
           std::to_string(got);
  }
  return "";
}

std::string check_overlaps(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                           const std::function<bool(size_t, size_t)>& replaces) {
  struct Range {
    const char* begin;
    const char* end;
    size_t index;
  };
  // Of a type whose size is not known, which is refused elsewhere, none.
  const auto range = [](const ffi::AnyBuffer& buffer, size_t index) {
    const auto* begin = static_cast<const char*>(buffer.untyped_data());
    return Range{begin, begin + (has_whole_bytes(buffer.element_type()) ? buffer.size_bytes() : 0), index};
  };
  std::vector<Range> written;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) continue;
    if (const Range own = range(**result, i); own.begin != own.end) written.push_back(own);
  }
  std::sort(written.begin(), written.end(), [](const Range& x, const Range& y) { return x.begin < y.begin; });
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].begin < written[i - 1].end) return "results must not overlap";
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) continue;
    const Range read = range(*operand, i);
    if (read.begin == read.end) continue;
    const auto ends_before = [](const Range& x, const char* begin) { return x.end <= begin; };
    auto result = std::lower_bound(written.begin(), written.end(), read.begin, ends_before);
    if (result == written.end() || result->begin >= read.end) continue;
    if (result->begin == read.begin && result->end == read.end && replaces(i, result->index)) continue;
    return "operand " + std::to_string(i) + " must not overlap result " + std::to_string(result->index);
  }
  return "";
}

bool overlap(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y) {
  const auto *begin = static_cast<const char*>(x.untyped_data()), *other = static_cast<const char*>(y.untyped_data());
  return x.size_bytes() > 0 && y.size_bytes() > 0 && begin < other + y.size_bytes() && other < begin + x.size_bytes();
}

}  // namespace tcgemm
