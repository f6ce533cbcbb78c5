// The attributes of a call as the fields of what it describes.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/fields.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// As FieldReader takes them.
class Attributes {
 public:
  explicit Attributes(const xla::ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  Found get(std::string_view name, T* out) const {
    auto value = attributes_.get<T>(name);
    if (value.has_error()) return attributes_.contains(name) ? Found::kOfOtherType : Found::kNo;
    *out = *value;
    return Found::kYes;
  }

  Found get(std::string_view name, std::string* out) const {
    std::string_view text;
    const Found found = get(name, &text);
    *out = text;
    return found;
  }

  // Of int32_t too, which attributes have as 64-bit integers.
  template <typename T>
  Found get(std::string_view name, std::vector<T>* out) const {
    using Given = std::conditional_t<std::is_same_v<T, double>, double, int64_t>;
    xla::ffi::Span<const Given> values;
    if (const Found found = get(name, &values); found != Found::kYes) return found;
    out->clear();
    for (const Given value : values) {
      out->push_back(static_cast<T>(value));
      if constexpr (!std::is_same_v<T, Given>) {
        if (out->back() != value) return Found::kOfOtherType;
      }
    }
    return Found::kYes;
  }

 private:
  const xla::ffi::Dictionary& attributes_;
};

// Reads the ABI number and what `visit_all(visitor)` names, which must be all there is. What is wrong, or nothing.
template <typename VisitAll>
std::string read_attributes(const xla::ffi::Dictionary& attributes, const VisitAll& visit_all) {
  const Attributes source(attributes);
  FieldReader<Attributes> reader(source);
  int64_t abi = 0;
  reader("abi", abi);
  if (!reader.error().empty()) return reader.error();
  // Attributes of another version may have any names.
  if (std::string error = check_abi(abi); !error.empty()) return error;
  visit_all(reader);
  if (!reader.error().empty() || reader.num_visited() == attributes.size()) return reader.error();
  std::vector<std::string_view> known{"abi"};
  visit_all([&](std::string_view name, auto&) { known.push_back(name); });
  for (std::string_view name : attributes) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return std::string(name) + " must not be given: no attribute has this name";
    }
  }
  return "";
}

}  // namespace tcgemm
