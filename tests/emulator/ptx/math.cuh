// Stands in for csrc/ptx/math.cuh: exact where the hardware is approximate.
#pragma once

#include <cmath>

namespace tcgemm::ptx {

inline float ex2_approx_ftz_f32(float x) { return std::exp2(x); }
inline float rcp_approx_ftz_f32(float x) { return 1.0f / x; }

inline float max_nan_f32(float x, float y) {
  if (x == y) return std::signbit(x) ? y : x;
  return x > y || x != x ? x : y;
}
inline float min_nan_f32(float x, float y) {
  if (x == y) return std::signbit(x) ? x : y;
  return x < y || x != x ? x : y;
}

}  // namespace tcgemm::ptx
