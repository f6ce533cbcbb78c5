// Reductions of an epilogue's results over a few columns or rows, among the threads of a warp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/elementwise.cuh"

namespace tcgemm::epilogue {

// The operation that reduces 8 or 16 neighbors of a result to one, and which elements are neighbors: adjacent columns
// of a row, or adjacent rows of a column.
enum class Reduction { kSum, kMax, kMin };
enum class Over { kColumns, kRows };

template <Reduction kind, typename Value>
__device__ __forceinline__ Value combine(Value x, Value y) {
  if constexpr (kind == Reduction::kSum) return x + y;
  if constexpr (kind == Reduction::kMax) return elementwise::maximum(x, y);
  if constexpr (kind == Reduction::kMin) return elementwise::minimum(x, y);
}

// The identity element of `combine`: combine(x, identity) == x.
template <Reduction kind, typename Value>
__device__ __forceinline__ Value identity() {
  constexpr bool kIsReal = std::is_same_v<Value, float> || std::is_same_v<Value, double>;
  if constexpr (kind == Reduction::kSum) {
    return Value(0);
  } else if constexpr (kIsReal) {
    // mutant: maxima_from_0
    return kind == Reduction::kMax ? -elementwise::infinity<Value>() : elementwise::infinity<Value>();
  } else {
    return kind == Reduction::kMax ? elementwise::kSmallest<Value> : elementwise::kLargest<Value>;
  }
}

// Returns the x of the thread of this warp whose lane is this thread's lane ^ bits.
template <typename Value>
__device__ __forceinline__ Value exchange(Value x, int bits) {
  using Word = std::conditional_t<sizeof(Value) == 8, unsigned long long, uint32_t>;
  const Word word = __shfl_xor_sync(~0u, static_cast<Word>(elementwise::bit_cast<elementwise::Bits<Value>>(x)), bits);
  return elementwise::bit_cast<Value>(static_cast<elementwise::Bits<Value>>(word));
}

// Combines values[i], for each i < kPlaces, over the kThreads threads whose lanes differ by multiples of kStride. The
// result for i = (lane / kStride) % kPlaces is left in values[0] of each thread.
template <Reduction kind, int kThreads, int kStride, typename Value, int kPlaces>
__device__ __forceinline__ void reduce_places(Value (&values)[kPlaces], int lane) {
  static_assert((kPlaces & (kPlaces - 1)) == 0 && kPlaces <= kThreads, "each place is that of some thread");
#pragma unroll
  for (int step = 1; step < kPlaces; step *= 2) {
    const bool is_second = lane / kStride & step;
#pragma unroll
    for (int i = 0; i < kPlaces; i += 2 * step) {
      // mutant: half_of_eight_rows
      const Value sent = is_second ? values[i] : values[i + step], kept = is_second ? values[i + step] : values[i];
      values[i] = combine<kind>(kept, exchange(sent, step * kStride));
    }
  }
#pragma unroll
  for (int step = kPlaces; step < kThreads; step *= 2) {
    values[0] = combine<kind>(values[0], exchange(values[0], step * kStride));
  }
}

}  // namespace tcgemm::epilogue
