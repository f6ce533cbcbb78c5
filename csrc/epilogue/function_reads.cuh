// The operands of an epilogue function: where they are, and the scalars and vectors of a tile, which are loaded before
// its accumulators are complete.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/elementwise.cuh"
#include "epilogue/function_params.h"
#include "ptx/global_memory.cuh"

namespace tcgemm::epilogue {

// Along what of the product a read varies inside a matrix.
enum class Along { kNothing, kM, kN, kBoth };

// Where a matrix of the batch is, and the end of its rows. Of a grouped product one for each group: `idx` and `outer`
// are then the batch entry, `inner` the group, and rows are counted over all groups.
struct BatchPlace {
  int32_t idx, outer, inner, m_end;

  // mutant: batches_exchanged
  __device__ __forceinline__ BatchPlace(const FunctionParams& params, int32_t batch_idx)
      : idx(batch_idx),
        outer(params.per_batch_inner.divide(batch_idx)),
        inner(batch_idx - outer * params.batch_inner),
        m_end(params.m) {}
  // mutant: results_of_the_first_entry, operands_of_the_first_entry, operands_of_the_first_group
  __device__ __forceinline__ BatchPlace(int32_t entry, int32_t group, int32_t m_end)
      : idx(entry), outer(entry), inner(group), m_end(m_end) {}

  // Of what is read of it.
  template <typename T>
  __device__ __forceinline__ const T* first(const FunctionParams::Read& read) const {
    return static_cast<const T*>(read.data) + outer * read.batch_outer + inner * read.batch_inner;
  }
};

// Of a row, from the first one.
__device__ __forceinline__ int64_t row_offset(const FunctionParams::Read& read, int32_t m) {
  const int32_t period = read.period.divide(m);
  return period * read.m_outer + (m - period * read.period_rows) * read.m_inner;  // mutant: no_period
}

// The bits of two.
template <typename T>
using Two = typename elementwise::Unsigned<sizeof(T) < 4 ? 2 * sizeof(T) : 8>::type;
// What threads exchange of them.
template <typename T>
using Word = std::conditional_t<sizeof(T) <= 2, uint32_t, uint64_t>;

// `kCount` elements side by side in memory.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) PackOf {
  T x[kCount];
};

template <Along along>
inline constexpr bool kVariesM = along == Along::kM || along == Along::kBoth;
template <Along along>
inline constexpr bool kVariesN = along == Along::kN || along == Along::kBoth;
// Whether it is another number in another column of a kernel's (possibly swapped) problem, and in another row.
template <Along along, bool kSwapped>
inline constexpr bool kVariesAcross = kSwapped ? kVariesM<along> : kVariesN<along>;
template <Along along, bool kSwapped>
inline constexpr bool kVariesAlong = kSwapped ? kVariesN<along> : kVariesM<along>;

// Whether a tile that reaches past the product is treated as one inside it, and what is read past the last row or
// column is that of the last one: of functions whose only result is stored by rows, which leaves out what is not there.
template <typename F>
inline constexpr bool kReachesPast = F::kStoresRows && F::kNumResults == 1;

// The first of so many neighbors on a line, all of which the line has.
template <typename F>
__device__ __forceinline__ int32_t within(int32_t first, int32_t end, int count = 1) {
  return kReachesPast<F> ? min(first, end - count) : first;  // mutant: the_row_before_the_last
}

// Whether a read is of a scalar or of a vector that is read before the accumulators are complete.
template <typename T, Along along>
inline constexpr bool kIsVector = along != Along::kBoth && sizeof(T) <= 4;

// What is read of scalars and of vectors, for all of a warp's elements of a tile that is inside the product, before the
// accumulators are complete: loads would have to wait for those of the next tile's operands afterwards. Of what varies
// across, two neighbors in every 64 are a thread's. kBlocks: times 64 lines.
template <typename F, bool kSwapped, int kBlocks, int kGroups>
class FunctionVectors {
 public:
  static constexpr int kPairs = (kGroups + 7) / 8;

  // (line, across): the thread's first line, and the first element across.
  __device__ __forceinline__ void load_all(const FunctionParams& params, const BatchPlace& batch, int lane,
                                           int32_t line, int32_t across) {
    Loader loader{*this, params, batch, lane, line, across};
    F::load(loader);
    __syncwarp();
  }

  // The bits of an element on a line, or of a scalar.
  template <int i>
  __device__ __forceinline__ uint64_t on_line(int block, int half) const {
    return lines_[i][block][half];
  }
  // Two neighbors of group number `group`.
  template <int i, typename T>
  __device__ __forceinline__ Two<T> across(int group, int lane) const {
    const auto held = static_cast<Word<T>>(pairs_[i][group / 8]);
    return static_cast<Two<T>>(__shfl_sync(~0u, held, group % 8 * 4 + lane % 4));  // mutant: another_threads_vector
  }

 private:
  struct Loader {
    FunctionVectors& vectors;
    const FunctionParams& params;
    const BatchPlace& batch;
    const int lane;
    const int32_t line, across;

    template <int i, typename T, Along along>
    __device__ __forceinline__ void load() const {
      if constexpr (kIsVector<T, along>) {
        using Bits = elementwise::Bits<T>;
        const FunctionParams::Read& read = params.reads[i];
        const T* data = batch.first<T>(read);
        const auto place = [&](int32_t x) {
          x = within<F>(x, along == Along::kM ? batch.m_end : params.n);
          return along == Along::kM ? row_offset(read, x) : x * read.n;
        };
        if constexpr (along == Along::kNothing) {
          vectors.lines_[i][0][0] = ptx::ld_global<Bits>(data);
        } else if constexpr (kVariesAlong<along, kSwapped>) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              vectors.lines_[i][block][half] = ptx::ld_global<Bits>(data + place(line + 64 * block + 8 * half));
            }
          }
        } else {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const int first = 64 * pair + 2 * lane;
            if (first >= 8 * kGroups) continue;
            if constexpr (kSwapped) {
              const PackOf<Bits, 2> two{ptx::ld_global<Bits>(data + place(across + first)),
                                        ptx::ld_global<Bits>(data + place(across + first + 1))};
              vectors.pairs_[i][pair] = elementwise::bit_cast<Two<T>>(two);
            } else {
              vectors.pairs_[i][pair] = ptx::ld_global<Two<T>>(data + within<F>(across + first, params.n, 2));
            }
          }
        }
      }
    }
  };

  uint64_t lines_[F::kMostReads][kBlocks][2];
  uint64_t pairs_[F::kMostReads][kPairs];
};

// What has been loaded of a part of a tile: vectors, from a block of 64 lines and a group on, and matrices, if any.
template <typename Vectors, typename MatricesType>
struct LoadedPart {
  using Matrices = MatricesType;
  static constexpr bool kHasVectors = true;

  const Vectors& vectors;
  const int block, first_group;
  // pair<i, T>(column, half): two neighbors, of which the first is in this column after the part's first.
  const Matrices matrices;
};
struct NoMatrices {
  static constexpr bool kHasAny = false;
  template <int i>
  static constexpr bool kHas = false;
};
struct NothingLoaded {
  using Matrices = NoMatrices;
  static constexpr bool kHasVectors = false;
};

}  // namespace tcgemm::epilogue
