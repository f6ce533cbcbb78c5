// Stands in for csrc/ptx/math.cuh: exact where the hardware is approximate.
#pragma once

#include <cmath>

namespace tcgemm::ptx {

inline float ex2_approx_ftz_f32(float x) { return std::exp2(x); }
inline float rcp_approx_ftz_f32(float x) { return 1.0f / x; }

}  // namespace tcgemm::ptx
