// Reads the fields of a problem, which its visit_fields() and visit_dtypes() name, from wherever they are told: the
// attributes of a call, the dictionary of a query, text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/names.h"

namespace tcgemm {

enum class Found { kYes, kNo, kOfOtherType };

// A visitor. `Source` has Found get(std::string_view name, T* out) const for the types of fields that it meets and for
// std::string_view: enumerations are told by their names. What follows the first field that is wrong is not read.
template <typename Source>
class FieldReader {
 public:
  explicit FieldReader(const Source& source) : source_(source) {}

  // What is wrong with the first field that is; empty when none is.
  const std::string& error() const { return error_; }

  size_t num_visited() const { return num_visited_; }

  template <typename Field>
  void operator()(std::string_view name, Field& field) {
    ++num_visited_;
    if (!error_.empty()) return;
    if constexpr (std::is_enum_v<Field>) {
      std::string_view text;
      read(name, text);
      if (!error_.empty() || parse_name(text, &field)) return;
      error_ = std::string(name) + " must be " + choices<Field>() + ", got " + std::string(text);
    } else {
      read(name, field);
    }
  }

 private:
  template <typename T>
  void read(std::string_view name, T& value) {
    switch (source_.get(name, &value)) {
      case Found::kYes: return;
      case Found::kNo: error_ = std::string(name) + " must be given"; return;
      case Found::kOfOtherType: error_ = std::string(name) + " must be " + type_name<T>(); return;
    }
  }

  template <typename T>
  static const char* type_name() {
    if constexpr (std::is_same_v<T, int64_t>) return "a 64-bit integer";
    if constexpr (std::is_same_v<T, bool>) return "a boolean";
    if constexpr (std::is_same_v<T, double>) return "a 64-bit float";
    if constexpr (std::is_same_v<T, std::vector<int64_t>>) return "a list of 64-bit integers";
    if constexpr (std::is_same_v<T, std::vector<int32_t>>) return "a list of 32-bit integers";
    if constexpr (std::is_same_v<T, std::vector<double>>) return "a list of 64-bit floats";
    return "a string";
  }

  const Source& source_;
  size_t num_visited_ = 0;
  std::string error_;
};

// Reads a problem that `source` tells whole, dtypes included. What is wrong with it, or nothing.
template <typename Problem, typename Source>
std::string read_problem(const Source& source, Problem* p) {
  FieldReader<Source> reader(source);
  visit_fields(*p, reader);
  visit_dtypes(*p, [&](const char*, const char* name, auto& dtype) { reader(name, dtype); });
  return reader.error().empty() ? check_problem(*p) : reader.error();
}

}  // namespace tcgemm
