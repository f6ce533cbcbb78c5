// Which configs of a table are compiled: EMULATED_CONFIGS lists their names, each in quotes; nothing lists none.
#pragma once

#include <string_view>

// An element type as text.
#define EMULATED_NAME(type) EMULATED_TEXT(type)
#define EMULATED_TEXT(type) #type

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
