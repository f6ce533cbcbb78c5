// What a reduction does with two values.
#pragma once

#include <cstdint>

namespace tcgemm {

enum class ReduceOp : int32_t { kAdd, kMax, kMin };

}  // namespace tcgemm
