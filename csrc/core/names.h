// Enumerations by the names that calls give them.
#pragma once

#include <cstddef>
#include <string_view>

namespace tcgemm {

// The value with this name, of an enumeration whose values `names` lists in their order.
template <typename Names, typename Enum>
bool parse_name(const Names& names, std::string_view name, Enum* out) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) {
      *out = static_cast<Enum>(i);
      return true;
    }
  }
  return false;
}

}  // namespace tcgemm
