// The operands of an epilogue function: where they are, and the scalars and vectors of a tile, which are loaded before
// its accumulators are complete.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/elementwise.cuh"
#include "epilogue/function_params.h"
#include "ptx/global_memory.cuh"

namespace tcgemm::epilogue {

// Dimensions of the product along which an operand varies, inside a matrix.
enum class Along { kNothing, kM, kN, kBoth };

// Index of one matrix of the batch, and the end of its rows. In a grouped product, each group has a matrix: `idx` and
// `outer` are the batch entry, `inner` is the group, and rows are counted over all groups.
struct MatrixIndex {
  int32_t idx, outer, inner, m_end;

  // mutant: batches_exchanged
  __device__ __forceinline__ MatrixIndex(const FunctionParams& params, int32_t batch_idx)
      : idx(batch_idx),
        outer(params.per_batch_inner.divide(batch_idx)),
        inner(batch_idx - outer * params.batch_inner),
        m_end(params.m) {}
  // mutant: results_of_the_first_entry, operands_of_the_first_entry, operands_of_the_first_group
  __device__ __forceinline__ MatrixIndex(int32_t entry, int32_t group, int32_t m_end)
      : idx(entry), outer(entry), inner(group), m_end(m_end) {}

  // The first element of an operand of this matrix.
  template <typename T>
  __device__ __forceinline__ const T* first(const FunctionParams::Read& read) const {
    return static_cast<const T*>(read.data) + outer * read.batch_outer + inner * read.batch_inner;
  }
};

// Offset of row m in elements.
__device__ __forceinline__ int64_t row_offset(const FunctionParams::Read& read, int32_t m) {
  const int32_t period_idx = read.period.divide(m);
  return period_idx * read.m_outer + (m - period_idx * read.period_rows) * read.m_inner;  // mutant: no_period
}

// An unsigned integer with the bits of two neighbors.
template <typename T>
using PackedPair = typename elementwise::Unsigned<sizeof(T) < 4 ? 2 * sizeof(T) : 8>::type;
// The type in which __shfl_sync exchanges a PackedPair.
template <typename T>
using ShuffleWord = std::conditional_t<sizeof(T) <= 2, uint32_t, uint64_t>;

// `kCount` elements side by side in memory.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) PackOf {
  T x[kCount];
};

template <Along along>
inline constexpr bool kVariesM = along == Along::kM || along == Along::kBoth;
template <Along along>
inline constexpr bool kVariesN = along == Along::kN || along == Along::kBoth;
// Whether the operand varies with the column of the kernel's (possibly swapped) problem, and with the row.
template <Along along, bool kSwapped>
inline constexpr bool kVariesAcross = kSwapped ? kVariesM<along> : kVariesN<along>;
template <Along along, bool kSwapped>
inline constexpr bool kVariesAlong = kSwapped ? kVariesN<along> : kVariesM<along>;

// Whether tiles that reach past the product run the code of tiles inside it. Loads past the last row or column then
// load the last one. For functions with one result, which is stored by rows: the store leaves out what is not there.
template <typename F>
inline constexpr bool kClampsLoads = F::kStoresRows && F::kNumResults == 1;

// Clamps the index of the first of `count` neighbors, so that all of them are before `end`.
template <typename F>
__device__ __forceinline__ int32_t clamp_index(int32_t first, int32_t end, int count = 1) {
  return kClampsLoads<F> ? min(first, end - count) : first;  // mutant: the_row_before_the_last
}

// Whether an operand is a scalar or vector that is loaded before the accumulators are complete.
template <typename T, Along along>
inline constexpr bool kIsVector = along != Along::kBoth && sizeof(T) <= 4;

// Scalar and vector operands of all of a warp's elements of a tile, loaded before the accumulators are complete: later
// loads would wait behind the operand loads of the next tile. The warp has kBlocks blocks of 64 rows and kGroups groups
// of eight columns. Of a vector along the columns, each thread has two neighbors of every 64, which shuffles exchange.
template <typename F, bool kSwapped, int kBlocks, int kGroups>
class FunctionVectors {
 public:
  static constexpr int kPairs = (kGroups + 7) / 8;

  // (line, across): the thread's first row and the tile's first column of the kernel's (possibly swapped) problem.
  __device__ __forceinline__ void load_all(const FunctionParams& params, const MatrixIndex& batch, int lane,
                                           int32_t line, int32_t across) {
    Loader loader{*this, params, batch, lane, line, across};
    F::load(loader);
    __syncwarp();
  }

  // Bits of a row's element, or of a scalar.
  template <int i>
  __device__ __forceinline__ uint64_t on_line(int block, int half) const {
    return lines_[i][block][half];
  }
  // The thread's two neighbors of a group of columns.
  template <int i, typename T>
  __device__ __forceinline__ PackedPair<T> across(int group, int lane) const {
    const auto held = static_cast<ShuffleWord<T>>(pairs_[i][group / 8]);
    return static_cast<PackedPair<T>>(
        __shfl_sync(~0u, held, group % 8 * 4 + lane % 4));  // mutant: another_threads_vector
  }

 private:
  struct Loader {
    FunctionVectors& vectors;
    const FunctionParams& params;
    const MatrixIndex& batch;
    const int lane;
    const int32_t line, across;

    template <int i, typename T, Along along>
    __device__ __forceinline__ void load() const {
      if constexpr (kIsVector<T, along>) {
        using Bits = elementwise::Bits<T>;
        const FunctionParams::Read& read = params.reads[i];
        const T* data = batch.first<T>(read);
        const auto place = [&](int32_t x) {
          x = clamp_index<F>(x, along == Along::kM ? batch.m_end : params.n);
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
              vectors.pairs_[i][pair] = elementwise::bit_cast<PackedPair<T>>(two);
            } else {
              vectors.pairs_[i][pair] =
                  ptx::ld_global<PackedPair<T>>(data + clamp_index<F>(across + first, params.n, 2));
            }
          }
        }
      }
    }
  };

  uint64_t lines_[F::kMostReads][kBlocks][2];
  uint64_t pairs_[F::kMostReads][kPairs];
};

// Operands of a part of a tile that are loaded already: vectors, from a block of 64 rows and a group of columns on, and
// matrices, if any.
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
