// Which rows of a warp's tile the 8-row groups of mma operands hold.
//
// mma.sync sees operands as groups of 8 rows (of A) or columns (of B), lane / 4 being the index
// inside the group. Nothing forces group j to be rows 8 * j ... 8 * j + 7: any permutation gives
// the same product with rows of D permuted alike. An operand whose rows are contiguous in shared
// memory is read wide, so that a lane gets adjacent rows for different groups.
#pragma once

namespace tcgemm {

enum class FragmentOrder {
  kConsecutive,  // group j holds rows 8 j + i
  kPairs,        // of 16 rows, group j holds rows 2 i + j
  kQuads,        // of 32 rows, group j holds rows 4 j + i and, for i >= 4, 16 + 4 j + (i - 4)
};

// Row of the warp's tile that group `group` holds at index `i` (0 <= i < 8).
template <FragmentOrder kOrder>
__host__ __device__ constexpr int fragment_row(int group, int i) {
  switch (kOrder) {
    case FragmentOrder::kConsecutive: return group * 8 + i;
    case FragmentOrder::kPairs: return group / 2 * 16 + i * 2 + group % 2;
    case FragmentOrder::kQuads: return group / 4 * 32 + i / 4 * 16 + group % 4 * 4 + i % 4;
  }
  return 0;
}

// The 16 rows of groups 2 * pair and 2 * pair + 1 are two runs of 8 neighbors. The first row of a run:
template <FragmentOrder kOrder>
__host__ __device__ constexpr int run_row(int pair, int run) {
  if (kOrder == FragmentOrder::kQuads) return pair / 2 * 32 + pair % 2 * 8 + run * 16;
  return pair * 16 + run * 8;  // mutant: another_runs
}

// Where the i-th row of a run is among the 16, those of the first group being before those of the second.
template <FragmentOrder kOrder>
__host__ __device__ constexpr int run_slot(int run, int i) {
  switch (kOrder) {
    case FragmentOrder::kConsecutive: return run * 8 + i;  // mutant: a_runs_place
    case FragmentOrder::kPairs: return i % 2 * 8 + run * 4 + i / 2;
    case FragmentOrder::kQuads: return i / 4 * 8 + run * 4 + i % 4;
  }
  return 0;
}

}  // namespace tcgemm
