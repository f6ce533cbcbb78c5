// Which configs of a table are compiled: EMULATED_CONFIGS lists their names, each in quotes.
#pragma once

#include <string_view>

namespace emulator {

constexpr bool is_chosen(std::string_view name) {
  for (std::string_view chosen : {EMULATED_CONFIGS}) {
    if (chosen == name) return true;
  }
  return false;
}

}  // namespace emulator
