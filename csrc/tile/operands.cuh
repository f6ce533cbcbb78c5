// What a kernel multiplies, as types: each operand by itself, and the instruction that takes them.
//
//   kernel<Config, Mma<TF32, TF32, float>,
//          Operands<Operand<float, Major::kMN, Source::kTransposed>, Operand<float, Major::kK, Source::kShared>>, ...>
#pragma once

namespace tcgemm::tile {

// Which of an operand's extents is contiguous in memory: K, or the other one, M of A and N of B.
enum class Major { kK, kMN };

// Where the instruction takes an operand from.
enum class Source {
  kShared,      // shared memory, as it lies in device memory
  kTransposed,  // registers, which threads load from shared memory so that K comes first
  kRegisters,   // registers, into which threads load fragments of either major
};

// `Element`: in memory. `scaled_rows`: how many rows of an operand share a block scale in a kernel, which may be fewer
// than in memory; 0: the operand has no block scales.
template <typename ElementType, Major major, Source source, int scaled_rows = 0>
struct Operand {
  using Element = ElementType;
  static constexpr Major kMajor = major;
  static constexpr Source kSource = source;
  static constexpr bool kIsKMajor = major == Major::kK;
  static constexpr int kScaledRows = scaled_rows;
};

template <typename AType, typename BType>
struct Operands {
  using A = AType;
  using B = BType;
};

// An instruction by the types that it multiplies and adds up. Its accumulators are promoted after every
// kPromoteEvery elements of K; 0: with the last one.
template <typename AType, typename BType, typename AccumulatorType, int promote_every = 0>
struct Mma {
  using A = AType;
  using B = BType;
  using Accumulator = AccumulatorType;
  static constexpr int kPromoteEvery = promote_every;
};

}  // namespace tcgemm::tile
