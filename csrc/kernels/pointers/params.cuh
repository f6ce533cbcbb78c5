// What a launch tells kernel.cuh.
#pragma once

namespace tcgemm::pointers {

inline constexpr int kThreads = 256;

// As many as one launch takes by value.
inline constexpr int kMaxBases = 128;
struct Bases {
  const char* address[kMaxBases];
};

}  // namespace tcgemm::pointers
