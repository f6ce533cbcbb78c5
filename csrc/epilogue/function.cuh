// Elementwise functions of JAX as epilogues: how kernels call the code that is generated of them.
//
// A function is a struct F in tcgemm::elementwise with
//
//   Sum                          the type of the sums that it takes
//   kIsGated                     whether it takes two sums, of the two products of a gated one
//   kStoresRows                  whether its first result, D, is of a type that kernels store by rows
//   whole_level(dim)             the level that is all of dimension `dim`, or -1; see Index below
//   load(tile), arrive(tile)     call tile.load<i, T, along>() and tile.arrive<i, T, along>() for each read
//   run(sum[, up], element, at)  calls element.read<i, T, along>(), and element.write<i>(y) with result i
//   store(tile)                  calls tile.store<i, T>() for each result, or, for one that is reduced,
//                                tile.reduce<i, T, Value, kind, over>(), Value being what T is computed with
//   visit_matrices(visit)        calls visit.visit<i, T>() for each read along both rows and columns
//
// where `tile` is a FunctionTile below: the elements that a thread has of a few groups of eight columns.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/elementwise.cuh"
#include "epilogue/function_params.h"
#include "ptx/cluster.cuh"
#include "ptx/global_memory.cuh"

namespace tcgemm::epilogue {

// Along what of the product a read varies inside a matrix.
enum class Along { kNothing, kM, kN, kBoth };

// What becomes of a result that is reduced, over eight columns or over eight rows.
enum class Reduction { kSum, kMax, kMin };
enum class Over { kColumns, kRows };

template <Reduction kind, typename Value>
__device__ __forceinline__ Value combine(Value x, Value y) {
  if constexpr (kind == Reduction::kSum) return x + y;
  if constexpr (kind == Reduction::kMax) return elementwise::maximum(x, y);
  if constexpr (kind == Reduction::kMin) return elementwise::minimum(x, y);
}

// What changes nothing where it is combined.
template <Reduction kind, typename Value>
__device__ __forceinline__ Value identity() {
  constexpr bool kIsReal = std::is_same_v<Value, float> || std::is_same_v<Value, double>;
  if constexpr (kind == Reduction::kSum) {
    return Value(0);
  } else if constexpr (kIsReal) {
    return kind == Reduction::kMax ? -elementwise::infinity<Value>() : elementwise::infinity<Value>();
  } else {
    return kind == Reduction::kMax ? elementwise::kSmallest<Value> : elementwise::kLargest<Value>;
  }
}

// That of the thread whose number differs in these bits, of the same warp.
template <typename Value>
__device__ __forceinline__ Value exchange(Value x, int bits) {
  using Word = std::conditional_t<sizeof(Value) == 8, unsigned long long, uint32_t>;
  const Word word = __shfl_xor_sync(~0u, static_cast<Word>(elementwise::bit_cast<elementwise::Bits<Value>>(x)), bits);
  return elementwise::bit_cast<Value>(static_cast<elementwise::Bits<Value>>(word));
}

// Where a matrix of the batch is, and the end of its rows. Of a grouped product one for each group: `idx` and `outer`
// are then the batch entry, `inner` the group, and rows are counted over all groups.
struct BatchPlace {
  int32_t idx, outer, inner, m_end;

  __device__ __forceinline__ BatchPlace(const FunctionParams& params, int32_t batch_idx)
      : idx(batch_idx),
        outer(params.per_batch_inner.divide(batch_idx)),
        inner(batch_idx - outer * params.batch_inner),
        m_end(params.m) {}
  __device__ __forceinline__ BatchPlace(int32_t entry, int32_t group, int32_t m_end)
      : idx(entry), outer(entry), inner(group), m_end(m_end) {}
};

// `kCount` elements side by side in memory.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) PackOf {
  T x[kCount];
};

// Four words of each of four neighbouring threads: word i of thread j becomes word j of thread i.
template <typename Word>
__device__ __forceinline__ void transpose_four(Word (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool is_second = ptx::tid_x() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const Word sent = is_second ? words[i] : words[i + step];
      const Word received = __shfl_xor_sync(~0u, sent, step);
      (is_second ? words[i] : words[i + step]) = received;
    }
  }
}

// A thread's elements of kGroups groups of eight columns and of kHalves rows that lie eight apart: two neighbours of a
// row in each. Element (group, half, e) is that at (m + 8 * half, n + 8 * group + e), or, if kSwapped, at
// (m + 8 * group + e, n + 8 * half). kRows: D is stored by rows, by the caller, who takes it from the sums. kWhole: all
// are inside the product, and unless kSwapped eight columns of a matrix lie side by side, aligned; then four threads
// that have the columns of a group between them load and store its rows together.
template <typename F, bool kSwapped, bool kRows, bool kWhole, int kGroups, int kHalves>
class FunctionTile {
 public:
  using Sum = typename F::Sum;

  // `groups`: how many there are. Begins to load what is read, which run() waits for.
  __device__ __forceinline__ FunctionTile(const FunctionParams& params, const BatchPlace& batch, int32_t m, int32_t n,
                                          int groups)
      : params_(params), batch_(batch), m_(m), n_(n), groups_(groups) {
    F::load(*this);
  }

  // Replaces the sums by the elements of D that kernels store by rows. `up`: those of a gated product's second matrix.
  __device__ __forceinline__ void run(Sum* sums, const Sum* up) {
    F::arrive(*this);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Element element{*this, group, half, e};
          const int i = (group * kHalves + half) * 2 + e;
          if constexpr (F::kIsGated) {
            F::run(sums[i], up[i], element, Index{element});
          } else {
            F::run(sums[i], element, Index{element});
          }
          if constexpr (kRows) sums[i] = element.of_row;
        }
      }
    }
    F::store(*this);
  }

  // --- what the generated code calls ---

  // What is known where it is compiled: registers have no index that changes.
  struct Element {
    FunctionTile& tile;
    const int group, half, e;
    float of_row = 0;

    template <int i, typename T, Along along>
    __device__ __forceinline__ T read() const {
      const auto& found = tile.reads_[i][group][half];
      if constexpr (kTogether<T> && along == Along::kBoth) {
        return elementwise::bit_cast<PackOf<T, 2>>(static_cast<Two<T>>(found[0])).x[e];
      } else {
        return elementwise::bit_cast<T>(static_cast<elementwise::Bits<T>>(found[e]));
      }
    }

    template <int i, typename T>
    __device__ __forceinline__ void write(const T& y) {
      if constexpr (i > 0 || !kRows) {
        tile.results_[i][group][half][e] = bits_of(y);
      } else if constexpr (std::is_same_v<T, float>) {
        of_row = y;
      } else {
        of_row = elementwise::wide(y);
      }
    }

    __device__ __forceinline__ int32_t position(int level) const {
      if (level == 0) return tile.batch_.outer;
      if (level == 1) return tile.batch_.inner;
      return level == 2 ? tile.row(group, half, e) : tile.column(group, half, e);
    }
  };

  struct Index {
    const Element& element;

    __device__ __forceinline__ int32_t operator[](int dim) const {
      if (F::whole_level(dim) >= 0) return element.position(F::whole_level(dim));
      const FunctionParams::Index& index = element.tile.params_.indices[dim];
      const int32_t i = index.divisor.divide(element.position(index.level));
      return i - index.per_extent.divide(i) * index.extent;
    }
  };

  template <int i, typename T, Along along>
  __device__ __forceinline__ void load() {
    const FunctionParams::Read& read = params_.reads[i];
    const T* data =
        static_cast<const T*>(read.data) + batch_.outer * read.batch_outer + batch_.inner * read.batch_inner;
    if constexpr (kTogether<T> && along == Along::kBoth) return load_together<i>(read, data);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t m = row(group, half, e), n = column(group, half, e);
          if (!is_inside(m, n)) continue;
          int64_t place = 0;
          if constexpr (along == Along::kM || along == Along::kBoth) place += row_offset(read, m);
          if constexpr (along == Along::kN || along == Along::kBoth) place += n * read.n;
          reads_[i][group][half][e] = get(data + place);
        }
      }
    }
  }

  // Once all loads are under way.
  template <int i, typename T, Along along>
  __device__ __forceinline__ void arrive() {
    if constexpr (kTogether<T> && along == Along::kBoth) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Word<T> words[4];
#pragma unroll
        for (int group = 0; group < 4; ++group) words[group] = static_cast<Word<T>>(reads_[i][group][half][0]);
        transpose_four(words);
#pragma unroll
        for (int group = 0; group < 4; ++group) reads_[i][group][half][0] = words[group];
      }
    }
  }

  template <int i, typename T>
  __device__ __forceinline__ void store() {
    if constexpr (i == 0 && kRows) return;
    using Bits = elementwise::Bits<T>;
    Bits* const matrix = static_cast<Bits*>(params_.results[i]) + int64_t{batch_.idx} * params_.m * params_.n;
    if constexpr (kTogether<T>) return store_together<i, T>(matrix);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t m = row(group, half, e), n = column(group, half, e);
          if (is_inside(m, n)) matrix[int64_t{m} * params_.n + n] = static_cast<Bits>(results_[i][group][half][e]);
        }
      }
    }
  }

  // Stores what is left of a result, by the thread that has the first element of eight.
  template <int i, typename T, typename Value, Reduction kind, Over over>
  __device__ __forceinline__ void reduce() {
    // The eight are two neighbours in each of four threads side by side, or one in each of eight threads.
    constexpr bool kPairs = (over == Over::kColumns) != kSwapped;
    constexpr int kFirstBit = kPairs ? 1 : 4, kLastBit = kPairs ? 2 : 16;
    const bool is_first = kPairs ? ptx::tid_x() % 4 == 0 : ptx::tid_x() % 32 < 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Value values[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool is_inside_it = is_inside(row(group, half, e), column(group, half, e));
          values[e] = is_inside_it ? value_of<T, Value>(results_[i][group][half][e]) : identity<kind, Value>();
        }
        if constexpr (kPairs) values[0] = combine<kind>(values[0], values[1]);
#pragma unroll
        for (int e = 0; e < (kPairs ? 1 : 2); ++e) {
#pragma unroll
          for (int bit = kFirstBit; bit <= kLastBit; bit *= 2) {
            values[e] = combine<kind>(values[e], exchange(values[e], bit));
          }
          const int32_t m = row(group, half, e), n = column(group, half, e);
          if (is_first && is_inside(m, n)) place_of<i, Value, over>(m, n) = values[e];
        }
      }
    }
  }

 private:
  static_assert(!kRows || (F::kStoresRows && std::is_same_v<Sum, float>), "rows are stored of floats");

  template <typename T>
  static constexpr bool kTogether = kWhole && !kSwapped && kGroups == 4 && sizeof(T) <= 4;
  // The bits of two.
  template <typename T>
  using Two = typename elementwise::Unsigned<sizeof(T) < 4 ? 2 * sizeof(T) : 8>::type;
  // What threads exchange.
  template <typename T>
  using Word = std::conditional_t<sizeof(T) <= 2, uint32_t, uint64_t>;

  template <typename T>
  static __device__ __forceinline__ elementwise::Bits<T> bits_of(const T& x) {
    return elementwise::bit_cast<elementwise::Bits<T>>(x);
  }
  template <typename T, typename Value>
  static __device__ __forceinline__ Value value_of(uint64_t bits) {
    const T x = elementwise::bit_cast<T>(static_cast<elementwise::Bits<T>>(bits));
    if constexpr (std::is_same_v<T, Value>) return x;
    if constexpr (!std::is_same_v<T, Value>) return elementwise::wide(x);
  }
  // Where what is left of eight elements lies of which this is the first.
  template <int i, typename Value, Over over>
  __device__ __forceinline__ Value& place_of(int32_t m, int32_t n) const {
    constexpr bool kRows8 = over == Over::kRows;
    const int32_t rows = kRows8 ? (params_.m + 7) / 8 : params_.m, columns = kRows8 ? params_.n : (params_.n + 7) / 8;
    const int64_t line = int64_t{batch_.idx} * rows + (kRows8 ? m / 8 : m);
    return static_cast<Value*>(params_.results[i])[line * columns + (kRows8 ? n : n / 8)];
  }
  template <typename T>
  static __device__ __forceinline__ elementwise::Bits<T> get(const T* data) {
    return __ldg(reinterpret_cast<const elementwise::Bits<T>*>(data));
  }

  // The columns of group number lane % 4, whose first is ours but for where a thread's are in its group.
  __device__ __forceinline__ int32_t group_column() const { return (n_ & ~7) + 8 * (ptx::tid_x() % 4); }
  __device__ __forceinline__ bool has_group() const { return static_cast<int>(ptx::tid_x() % 4) < groups_; }

  template <int i, typename T>
  __device__ __forceinline__ void load_together(const FunctionParams::Read& read, const T* data) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      // Loaded in pieces of at most 16 bytes.
      constexpr int kPieces = sizeof(T) == 4 ? 2 : 1;
      using Piece = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
      Piece pieces[kPieces] = {};
      const auto* source = reinterpret_cast<const Piece*>(data + row_offset(read, m_ + 8 * half) + group_column());
      if (has_group()) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) pieces[piece] = __ldg(source + piece);
      }
      Two<T> pairs[4];
      memcpy(pairs, pieces, sizeof(pairs));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) reads_[i][pair][half][0] = pairs[pair];
    }
  }

  template <int i, typename T, typename Bits>
  __device__ __forceinline__ void store_together(Bits* matrix) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Word<T> words[4];
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const PackOf<Bits, 2> pair{static_cast<Bits>(results_[i][group][half][0]),
                                   static_cast<Bits>(results_[i][group][half][1])};
        words[group] = elementwise::bit_cast<Two<T>>(pair);
      }
      transpose_four(words);
      Two<T> pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) pairs[pair] = static_cast<Two<T>>(words[pair]);
      constexpr int kPieces = sizeof(T) == 4 ? 2 : 1;
      using Piece = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
      Piece pieces[kPieces];
      memcpy(pieces, pairs, sizeof(pairs));
      auto* target = reinterpret_cast<Piece*>(matrix + int64_t{m_ + 8 * half} * params_.n + group_column());
      if (has_group()) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) target[piece] = pieces[piece];
      }
    }
  }

  static __device__ __forceinline__ int64_t row_offset(const FunctionParams::Read& read, int32_t m) {
    const int32_t period = read.period.divide(m);
    return period * read.m_outer + (m - period * read.period_rows) * read.m_inner;
  }

  __device__ __forceinline__ int32_t row(int group, int half, int e) const {
    return m_ + (kSwapped ? 8 * group + e : 8 * half);
  }
  __device__ __forceinline__ int32_t column(int group, int half, int e) const {
    return n_ + (kSwapped ? 8 * half : 8 * group + e);
  }
  __device__ __forceinline__ bool is_inside(int32_t m, int32_t n) const {
    return kWhole || (m < batch_.m_end && n < params_.n);
  }

  const FunctionParams& params_;
  const BatchPlace& batch_;
  const int32_t m_, n_;
  const int groups_;
  uint64_t reads_[FunctionParams::kMostReads][kGroups][kHalves][2];
  uint64_t results_[FunctionParams::kMostResults][kGroups][kHalves][2];
};

// Brings to L2 what a function will read of matrices in a part of the product, by `num_threads` threads.
template <typename F>
struct FunctionPrefetch {
  const FunctionParams& params;
  const BatchPlace batch;
  const int32_t m, n, rows, columns;  // may go past the product
  const int thread_idx, num_threads;

  __device__ __forceinline__ void run() const { F::visit_matrices(*this); }

  template <int i, typename T>
  __device__ __forceinline__ void visit() const {
    const FunctionParams::Read& read = params.reads[i];
    if (!params.in_eights) return;
    const T* data = static_cast<const T*>(read.data) + batch.outer * read.batch_outer + batch.inner * read.batch_inner;
    const int32_t end = min(m + rows, params.m);
    const int64_t bytes = static_cast<int64_t>(min(columns, params.n - n)) * sizeof(T);
    for (int32_t row = m + thread_idx; row < end; row += num_threads) {
      const int32_t period = read.period.divide(row);
      const int64_t offset = period * read.m_outer + (row - period * read.period_rows) * read.m_inner + n;
      const char* line = reinterpret_cast<const char*>(data + offset);
      for (int64_t byte = 0; byte < bytes; byte += 128) ptx::prefetch_global_l2(line + byte);
    }
  }
};

}  // namespace tcgemm::epilogue
