// Division by a number that is known before the launch.
#pragma once

#include <cstdint>

namespace tcgemm {

// n / divisor for 0 <= n < 2^31 as a multiplication and a shift (Granlund and Montgomery, "Division by
// Invariant Integers using Multiplication"): a few clocks, where a general division takes over a hundred.
class Divisor {
 public:
  Divisor() = default;
  // 1 <= divisor < 2^31
  __host__ explicit Divisor(int64_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << (shift_ + 1)) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (32 + shift_)) + divisor_ - 1) / divisor_);
  }

  __device__ __forceinline__ int32_t divide(int32_t n) const {
    return divisor_ == 1 ? n : static_cast<int32_t>(__umulhi(n, multiplier_) >> shift_);
  }

 private:
  uint32_t divisor_ = 1, multiplier_ = 0, shift_ = 0;
};

}  // namespace tcgemm
