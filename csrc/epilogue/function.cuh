// Elementwise functions of JAX as epilogues: how kernels call the code that is generated of them.
//
// A function is a struct F in tcgemm::elementwise with
//
//   Sum                            the type of the accumulators
//   kIsGated                       whether it takes two accumulators, gate and up
//   kStoresRows                    whether its first result, D, is not reduced and has a type that kernels store by
//   rows kMostReads, kNumResults        number of operands, at least 1, and of results: extents of arrays
//   kMostNeighbors                 the most neighbors that a result reduces to one; 1: no result is reduced
//   kWork                          instructions of an element
//   whole_level(dim)               the level (0 and 1: outer and inner batch, 2: row, 3: column) that is JAX's
//   dimension
//                                  `dim` alone, or -1; see Index below
//   bytes(along)                   bytes of an element of all operands that vary along `along`, added up
//   boxed(i), boxed_bytes(i)       index of operand i among those that TMA can load, or -1, and bytes of its element
//   kBoxedBytes                    boxed_bytes(i) of all operands, added up
//   load(tile), arrive(tile)       call tile.load<i, T, along>() and tile.arrive<i, T, along>() for each operand
//   run(sum[, up], element, at)    computes an element: calls element.read<i, T, along>(), and element.write<i, T>(y),
//                                  which rounds result i to T; at[dim] is the element's index in JAX's dimension `dim`
//   store(tile)                    calls tile.store<i, T>() for each result, or, for one that is reduced,
//                                  tile.reduce<i, T, Value, kind, over, neighbors>(), Value being what T is
//                                  computed with
//
// where `tile` is a FunctionTile below: the elements that a thread has of a few groups of eight columns.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/elementwise.cuh"
#include "epilogue/function_params.h"
#include "epilogue/function_reads.cuh"
#include "epilogue/reductions.cuh"
#include "ptx/global_memory.cuh"

namespace tcgemm::epilogue {

// Four words of each of four neighboring threads: word i of thread j becomes word j of thread i.
template <typename Word>
__device__ __forceinline__ void transpose_four(Word (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool is_second = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const Word sent = is_second ? words[i] : words[i + step];
      const Word received = __shfl_xor_sync(~0u, sent, step);
      (is_second ? words[i] : words[i + step]) = received;
    }
  }
}

// A thread's fragment of D, in the layout of an MMA's accumulators: kGroups groups of eight columns by kHalves rows
// that are eight apart, and of each the two neighbors from column lane % 4 * 2 of the group on. kSwapped: the kernel
// computes D^T, so that rows of the fragment are columns of D. `line` is the index of a fragment's row, `across` that
// of a column. kRows: run() leaves D in the accumulators, and the caller stores it. kWhole: no bounds are checked.
// Either all elements are inside the product, or loads are clamped (kClampsLoads) and the caller leaves out what is
// outside; unless kSwapped, eight columns of a matrix are contiguous and aligned, so that the four lanes of a group
// load and store them as vectors. Loaded: the operands that are loaded already, a LoadedPart or NothingLoaded.
template <typename F, bool kSwapped, bool kRows, bool kWhole, int kGroups, int kHalves, typename Loaded = NothingLoaded>
class FunctionTile {
 public:
  using Sum = typename F::Sum;

  // Operands, as they come from memory.
  struct Reads {
    uint64_t values[F::kMostReads][kGroups][kHalves][2];
  };

  // (line, across): the thread's first line, and the first index of the groups. `groups`: number of groups in the tile.
  __device__ __forceinline__ FunctionTile(const FunctionParams& params, const MatrixIndex& batch, int lane,
                                          int32_t line, int32_t across, int groups, Reads& reads,
                                          const Loaded& loaded = {})
      : params_(params),
        batch_(batch),
        lane_(lane),
        line_(line),
        across_(across),
        groups_(groups),
        reads_(reads),
        loaded_(loaded) {}

  // Begins to load what is read, which run() waits for.
  __device__ __forceinline__ void load() {
    F::load(*this);
    // Else the compiler would issue loads late, where nothing hides how long they take.
    if constexpr (kWhole) __syncwarp();
  }

  // Replaces the accumulators by D if kRows. `up`: accumulators of a gated product's second matrix. Held: type of the
  // registers, which is Sum, or float where a kernel holds the bits of int32 accumulators in float registers.
  template <typename Held>
  __device__ __forceinline__ void run(Held* acc, const Held* up) {
    static_assert(!kRows || std::is_same_v<Held, float>, "D is stored from registers of float");
    F::arrive(*this);
    visit([&](int group, int half, int e) {
      Element element{*this, group, half, e};
      const int i = (group * kHalves + half) * 2 + e;
      if constexpr (F::kIsGated) {
        F::run(acc_of(acc[i]), acc_of(up[i]), element, Index{element});  // mutant: gate_for_up
      } else {
        F::run(acc_of(acc[i]), element, Index{element});
      }
      if constexpr (kRows) acc[i] = element.of_row;
    });
    F::store(*this);
  }

  // --- what the generated code calls ---

  // Indices are constants once loops are unrolled: registers have no index that changes.
  struct Element {
    FunctionTile& tile;
    const int group, half, e;
    float of_row = 0;

    template <int i, typename T, Along along>
    __device__ __forceinline__ T read() const {
      // mutant: one_line_for_all
      const auto& found =
          tile.reads_.values[i][kVariesAcross<along, kSwapped> ? group : 0][kVariesAlong<along, kSwapped> ? half : 0];
      if constexpr (kInPairs<i, T, along>) {
        return elementwise::bit_cast<PackOf<T, 2>>(static_cast<PackedPair<T>>(found[0])).x[e];
      } else {
        return elementwise::bit_cast<T>(
            static_cast<elementwise::Bits<T>>(found[kVariesAcross<along, kSwapped> ? e : 0]));
      }
    }

    // y: the element of result i, not yet rounded to T.
    template <int i, typename T, typename Value>
    __device__ __forceinline__ void write(const Value& y) {
      if constexpr (i == 0 && kRows) {  // mutant: halves_exchanged
        of_row = y;
      } else {
        tile.results_[i][group][half][e] = elementwise::stored_bits<T>(y);
      }
    }

    __device__ __forceinline__ int32_t position(int level) const {
      if (level == 0) return tile.batch_.outer;
      if (level == 1) return tile.batch_.inner;
      return level == 2 ? tile.row(group, half, e) : tile.column(group, half, e);
    }
  };

  // The element's indices in the dimensions of JAX's accumulator.
  struct Index {
    const Element& element;

    __device__ __forceinline__ int32_t operator[](int dim) const {
      if (F::whole_level(dim) >= 0) return element.position(F::whole_level(dim));
      const FunctionParams::Index& index = element.tile.params_.indices[dim];
      const int32_t i = index.divisor.divide(element.position(index.level));
      return i - index.per_extent.divide(i) * index.extent;  // mutant: wrong_extent
    }
  };

  template <int i, typename T, Along along>
  __device__ __forceinline__ void load() {
    const FunctionParams::Read& read = params_.reads[i];
    const T* data = batch_.first<T>(read);
    if constexpr (kIsLoaded<T, along>) {
      if constexpr (!kVariesAcross<along, kSwapped>) {
#pragma unroll
        for (int half = 0; half < (along == Along::kNothing ? 1 : kHalves); ++half) {
          const int block = along == Along::kNothing ? 0 : loaded_.block;
          reads_.values[i][0][half][0] = loaded_.vectors.template on_line<i>(block, half);
        }
      }
    } else if constexpr (kIsMatrix<i>) {
      // They are in shared memory.
    } else if constexpr (kTogether<T> && along == Along::kBoth) {
      load_together<i>(read, data);
    } else if constexpr (kInPairs<i, T, along>) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int32_t n = clamp_index<F>(across_ + pair() + 8 * group, params_.n, 2);  // mutant: wrong_pair
        if (group < groups_) reads_.values[i][group][0][0] = ptx::ld_global<PackedPair<T>>(data + n);
      }
    } else {
      visit<along>([&](int group, int half, int e) {
        int32_t m = row(group, half, e), n = column(group, half, e);
        if constexpr (kWhole) {
          m = clamp_index<F>(m, batch_.m_end);
          n = clamp_index<F>(n, params_.n);
        }
        if (!kWhole && ((kVariesM<along> && m >= batch_.m_end) || (kVariesN<along> && n >= params_.n))) return;
        int64_t place = 0;
        if constexpr (kVariesM<along>) place += row_offset(read, m);
        if constexpr (kVariesN<along>) place += n * read.n;
        reads_.values[i][group][half][e] = ptx::ld_global<elementwise::Bits<T>>(data + place);
      });
    }
  }

  // Called once all loads are issued: moves operand i to the lanes and registers where read() expects it.
  template <int i, typename T, Along along>
  __device__ __forceinline__ void arrive() {
    if constexpr (kIsMatrix<i>) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group >= groups_) break;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          reads_.values[i][group][half][0] = loaded_.matrices.template pair<i, T>(8 * group, half);
        }
      }
    } else if constexpr (kTogether<T> && along == Along::kBoth) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ShuffleWord<T> words[4];
#pragma unroll
        for (int group = 0; group < 4; ++group)
          words[group] = static_cast<ShuffleWord<T>>(reads_.values[i][group][half][0]);
        transpose_four(words, lane_);  // mutant: not_exchanged
#pragma unroll
        for (int group = 0; group < 4; ++group) reads_.values[i][group][half][0] = words[group];
      }
    } else if constexpr (kIsLoaded<T, along> && kVariesAcross<along, kSwapped>) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group < groups_) {
          reads_.values[i][group][0][0] = loaded_.vectors.template across<i, T>(loaded_.first_group + group, lane_);
        }
      }
    }
  }

  template <int i, typename T>
  __device__ __forceinline__ void store() {
    if constexpr (i == 0 && kRows) return;
    using Bits = elementwise::Bits<T>;
    // mutant: no_second_half
    Bits* const matrix = static_cast<Bits*>(params_.results[i]) + int64_t{batch_.idx} * params_.m * row_length<i>();
    if constexpr (kTogether<T>) return store_together<i, T>(matrix);
    visit([&](int group, int half, int e) {
      const int32_t m = row(group, half, e), n = column(group, half, e);
      if (is_inside(m, n)) matrix[int64_t{m} * row_length<i>() + n] = static_cast<Bits>(results_[i][group][half][e]);
    });
  }

  // Reduces each kNeighbors (8 or 16) neighbors of result i to one and stores it. Eight columns of a group are the
  // pairs of four neighboring lanes; eight lines are those of the eight lanes with the same lane % 4; 16 are two such
  // eights.
  template <int i, typename T, typename Value, Reduction kind, Over over, int kNeighbors>
  __device__ __forceinline__ void reduce() {
    constexpr bool kAcrossGroups = (over == Over::kColumns) != kSwapped;
    constexpr int kEights = kNeighbors / 8;
    static_assert(kEights == 1 || (kEights == 2 && (kAcrossGroups ? kGroups : kHalves) % 2 == 0), "a thread has both");
    const auto value = [&](int group, int half, int e) {
      // mutant: outside_is_reduced
      const bool is_inside_it = group < groups_ && is_inside(row(group, half, e), column(group, half, e));
      return is_inside_it ? value_of<T, Value>(results_[i][group][half][e]) : identity<kind, Value>();
    };
#pragma unroll
    for (int half = 0; half < kHalves; half += kAcrossGroups ? 1 : kEights) {
      if constexpr (kAcrossGroups) {
        constexpr int kPlaces = kGroups / kEights;
        Value values[kPlaces];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          // mutant: one_of_two_neighbors
          const Value two = combine<kind>(value(group, half, 0), value(group, half, 1));
          Value& all = values[group / kEights];
          all = group % kEights == 0 ? two : combine<kind>(all, two);  // mutant: the_second_eight_alone
        }
        reduce_places<kind, 4, 1>(values, lane_);
        // Each is that of one thread; others have it, too, where there are fewer than threads.
        if (const int place = lane_ % 4; place < kPlaces) {
          // mutant: eights_beside_each_other
          store_reduced<i, over, kNeighbors>(place * kEights, line_ + 8 * half, 0, values[0]);
        }
      } else {
        Value values[2 * kGroups];
#pragma unroll
        for (int place = 0; place < 2 * kGroups; ++place) {
          values[place] = value(place / 2, half, place % 2);
          if constexpr (kEights == 2) {
            // mutant: the_first_eight_lines_alone
            values[place] = combine<kind>(values[place], value(place / 2, half + 1, place % 2));
          }
        }
        reduce_places<kind, 8, 4>(values, lane_);
        const int place = lane_ / 4;
        // mutant: wrong_place
        store_reduced<i, over, kNeighbors>(place / 2, line_ - place + 8 * half, pair() + place % 2, values[0]);
      }
    }
  }

 private:
  static_assert(!kRows || F::kStoresRows, "only what is stored by rows");

  template <typename Held>
  static __device__ __forceinline__ Sum acc_of(Held held) {
    if constexpr (std::is_same_v<Held, Sum>) {
      return held;
    } else {
      return static_cast<Sum>(__float_as_uint(held));  // mutant: bits_taken_for_a_number
    }
  }

  template <typename T>
  static constexpr bool kTogether = kWhole && !kSwapped && kGroups == 4 && sizeof(T) <= 4;
  template <typename T, Along along>
  static constexpr bool kIsLoaded = Loaded::kHasVectors && kIsVector<T, along>;
  template <int i>
  static constexpr bool kIsMatrix = Loaded::Matrices::template kHas<i>;
  // Whether values[group][half][0] has two neighbors, packed.
  template <int i, typename T, Along along>
  static constexpr bool kInPairs = along == Along::kBoth ? kTogether<T> || kIsMatrix<i>
                                                         : kVariesAcross<along, kSwapped> && sizeof(T) <= 4 &&
                                                               (Loaded::kHasVectors || (kWhole && !kSwapped));

  // Calls f(group, half, e) for each element or, of operands that vary along `along` only, once for each of their
  // elements.
  template <Along along = Along::kBoth, typename Visitor>
  __device__ __forceinline__ void visit(Visitor&& f) const {
#pragma unroll
    for (int group = 0; group < (kVariesAcross<along, kSwapped> ? kGroups : 1); ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int half = 0; half < (kVariesAlong<along, kSwapped> ? kHalves : 1); ++half) {
#pragma unroll
        for (int e = 0; e < (kVariesAcross<along, kSwapped> ? 2 : 1); ++e) f(group, half, e);
      }
    }
  }

  template <typename T, typename Value>
  static __device__ __forceinline__ Value value_of(uint64_t bits) {
    const T x = elementwise::bit_cast<T>(static_cast<elementwise::Bits<T>>(bits));
    if constexpr (std::is_same_v<T, Value>) return x;
    if constexpr (!std::is_same_v<T, Value>) return elementwise::wide(x);
  }

  // Stores a reduction of kNeighbors neighbors. The first of them is on `line`, `offset` elements after the start of a
  // group; groups past the last one are ignored.
  template <int i, Over over, int kNeighbors, typename Value>
  __device__ __forceinline__ void store_reduced(int group, int32_t line, int offset, Value value) const {
    if (group >= groups_) return;
    const int32_t across = across_ + 8 * group + offset;
    const int32_t m = kSwapped ? across : line, n = kSwapped ? line : across;
    if (!is_inside(m, n)) return;
    // How many elements are reduced to one along M and along N.
    constexpr int kAlongM = over == Over::kRows ? kNeighbors : 1, kAlongN = over == Over::kRows ? 1 : kNeighbors;
    const int32_t rows = (params_.m + kAlongM - 1) / kAlongM, columns = (params_.n + kAlongN - 1) / kAlongN;
    const int64_t row = int64_t{batch_.idx} * rows + m / kAlongM;  // mutant: wrong_eight
    static_cast<Value*>(params_.results[i])[row * columns + n / kAlongN] = value;
  }

  // The columns of group number lane % 4, if there is one.
  __device__ __forceinline__ int32_t group_column() const { return across_ + 8 * (lane_ % 4); }
  __device__ __forceinline__ bool has_group() const { return lane_ % 4 < groups_; }

  template <int i, typename T>
  __device__ __forceinline__ void load_together(const FunctionParams::Read& read, const T* data) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t words[2 * sizeof(T)] = {};
      const int32_t m = clamp_index<F>(line_ + 8 * half, batch_.m_end);  // mutant: wrong_half
      const T* source = data + row_offset(read, m) + clamp_index<F>(group_column(), params_.n, 8);
      if (has_group()) {
        if constexpr (sizeof(T) == 1) {
          const uint64_t all = ptx::ld_global<uint64_t>(source);
          memcpy(words, &all, sizeof(all));
        } else {
#pragma unroll
          for (int word = 0; word < 2 * sizeof(T); word += 4) {
            ptx::ld_global_v4_u32(words + word, reinterpret_cast<const uint32_t*>(source) + word);
          }
        }
      }
      PackedPair<T> pairs[4];
      memcpy(pairs, words, sizeof(pairs));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) reads_.values[i][pair][half][0] = pairs[pair];
    }
  }

  template <int i>
  __device__ __forceinline__ int64_t row_length() const {
    return params_.row_lengths[i];  // mutant: rows_too_short
  }

  template <int i, typename T, typename Bits>
  __device__ __forceinline__ void store_together(Bits* matrix) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      ShuffleWord<T> words[4];
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const PackOf<Bits, 2> pair{static_cast<Bits>(results_[i][group][half][0]),
                                   static_cast<Bits>(results_[i][group][half][1])};
        words[group] = elementwise::bit_cast<PackedPair<T>>(pair);
      }
      transpose_four(words, lane_);
      PackedPair<T> pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) pairs[pair] = static_cast<PackedPair<T>>(words[pair]);
      constexpr int kChunks = sizeof(T) == 4 ? 2 : 1;
      using Chunk = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
      Chunk chunks[kChunks];
      memcpy(chunks, pairs, sizeof(pairs));
      auto* target = reinterpret_cast<Chunk*>(matrix + int64_t{line_ + 8 * half} * row_length<i>() + group_column());
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (has_group()) target[chunk] = chunks[chunk];
      }
    }
  }

  // Offset of the thread's first element from the first column of a group.
  __device__ __forceinline__ int32_t pair() const { return lane_ % 4 * 2; }
  __device__ __forceinline__ int32_t row(int group, int half, int e) const {
    return kSwapped ? across_ + 8 * group + pair() + e : line_ + 8 * half;
  }
  __device__ __forceinline__ int32_t column(int group, int half, int e) const {
    return kSwapped ? line_ + 8 * half : across_ + 8 * group + pair() + e;  // mutant: wrong_column
  }
  __device__ __forceinline__ bool is_inside(int32_t m, int32_t n) const {
    // mutant: not_bounded, as_if_all_rows_were_of_the_group, columns_not_bounded
    return kWhole || (m < batch_.m_end && n < params_.n);
  }

  const FunctionParams& params_;
  const MatrixIndex& batch_;
  const int lane_;
  const int32_t line_, across_;
  const int groups_;
  Reads& reads_;
  const Loaded loaded_;
  uint64_t results_[F::kNumResults][kGroups][kHalves][2];
};

// Runs a function on eight rows of a warp by 8 * kGroups columns from (m_idx, n_idx) on, and stores all results, D
// among them. get_acc(is_whole, acc) fills acc[product][element] with the lane's accumulators, in the order of
// FunctionTile; product 1 is `up` of a gated product. is_whole, a std::bool_constant: whether all elements are inside
// the product. kHasWhole: whether there is code for that. In code that runs once, fetching more instructions costs more
// than it saves.
template <typename F, int kGroups, bool kHasWhole = true, typename GetAcc>
__device__ __forceinline__ void run_on_eight_rows(const FunctionParams& params, const MatrixIndex& batch, int32_t m_idx,
                                                  int32_t n_idx, const GetAcc& get_acc) {
  const auto run = [&](auto is_whole) {
    using Tile = FunctionTile<F, false, false, decltype(is_whole)::value, kGroups, 1>;
    constexpr int kNumProducts = F::kIsGated ? 2 : 1;
    const int lane = threadIdx.x % 32, groups = min(kGroups, (params.n - n_idx + 7) / 8);
    typename Tile::Reads reads;
    Tile tile(params, batch, lane, m_idx + lane / 4, n_idx, groups, reads);  // mutant: a_runs_rows
    tile.load();
    typename F::Sum acc[kNumProducts][2 * kGroups];
    get_acc(is_whole, acc);
    tile.run(acc[0], acc[kNumProducts - 1]);  // mutant: gate_for_up_in_the_second_kernel
  };
  if constexpr (kHasWhole) {
    // mutant: outside_is_whole
    if (params.in_eights && m_idx + 8 <= batch.m_end && n_idx + 8 * kGroups <= params.n) return run(std::true_type{});
  }
  run(std::false_type{});
}

}  // namespace tcgemm::epilogue
