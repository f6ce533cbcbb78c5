// Which configs of a table are compiled: EMULATED_CONFIGS lists their names, each in quotes; nothing lists none.
#pragma once

#include <string_view>

namespace emulator {

#ifdef EMULATED_CONFIGS
constexpr bool is_chosen(std::string_view name) {
  for (std::string_view chosen : {EMULATED_CONFIGS}) {
    if (chosen == name) return true;
  }
  return false;
}
#endif

}  // namespace emulator
