// Enumerations by the names that calls give them.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace tcgemm {

// The names of an enumeration's values, in their order: a std::array, specialised beside each enumeration.
template <typename Enum>
inline constexpr std::array<const char*, 0> kNames{};

template <typename Enum>
const char* name_of(Enum value) {
  return kNames<Enum>[static_cast<size_t>(value)];
}

// False where no value has this name; `out` is then untouched.
template <typename Enum>
bool parse_name(std::string_view name, Enum* out) {
  for (size_t i = 0; i < kNames<Enum>.size(); ++i) {
    if (name == kNames<Enum>[i]) {
      *out = static_cast<Enum>(i);
      return true;
    }
  }
  return false;
}

// "a, b or c"
template <typename Enum>
std::string choices() {
  std::string text;
  for (size_t i = 0; i < kNames<Enum>.size(); ++i) {
    if (i > 0) text += i + 1 < kNames<Enum>.size() ? ", " : " or ";
    text += kNames<Enum>[i];
  }
  return text;
}

}  // namespace tcgemm
