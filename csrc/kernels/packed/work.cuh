// Which rows and columns a CTA computes. In grouped products, each CTA finds them from the sizes of the experts, by a
// scan of all its threads. No load of the weight can begin before, and surplus CTAs of the grid take this time, too.
#pragma once

#include <cstdint>

#include "kernels/packed/params.cuh"

namespace tcgemm::packed {

struct Work {
  int32_t first_tile;  // of the weight, among those of all experts
  int32_t column_block;
  int32_t row, row_end;  // the CTA's first row, and the end of the expert's rows
  int32_t expert;        // index among the experts of the call; below 0: rows that belong to no expert

  __device__ __forceinline__ bool has_no_expert() const { return expert < 0; }
};

// Exclusive (begin) and inclusive (end) prefix sum of a thread.
struct Range {
  uint32_t begin, end;
};

// Prefix sum of `value` over the CTA's threads in their order, from `*total` on, which saturates at `limit`; `*total`
// becomes the sum of all threads. `shares`: shared memory, a number for each warp.
template <int kThreads>
__device__ __forceinline__ Range block_scan(uint32_t value, uint32_t limit, uint32_t* shares, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int shift = 1; shift < 32; shift *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, shift);
    if (lane >= shift) value = min(value + other, limit);
  }
  if (lane == 31) shares[warp] = value;
  __syncthreads();  // mutant: shares_of_warps_not_awaited
  uint32_t before = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i == warp) before = *total;
    *total = min(*total + shares[i], limit);
  }
  const uint32_t end = min(before + value, limit), previous = __shfl_up_sync(~0u, end, 1);
  return {lane == 0 ? before : previous, end};
}

// Tiles of grouped products are ordered by expert; those of rows after the last expert come last. Within an expert, the
// row block varies fastest, so that consecutive CTAs read the same columns of the weight, from L2. Returns false for a
// surplus CTA.
template <typename Config>
__device__ __forceinline__ bool find_work(const Params& params, Work* work) {
  constexpr auto kTile = Config::kTile;
  constexpr int kThreads = kTile.threads(), kRows = kTile.rows();
  const uint32_t tile_idx = blockIdx.x / kTile.blocks();
  if constexpr (!Config::kGrouped) {
    const int32_t column_block = tile_idx / params.row_blocks;
    *work = {0, column_block, static_cast<int32_t>(tile_idx - column_block * params.row_blocks) * kTile.rows(), 0, 0};
    return true;
  }
  struct Run {
    int32_t expert;
    uint32_t row, row_end, tile_in_run;
  };
  constexpr int32_t kNoExpert = -1;
  __shared__ uint32_t shares[2][kThreads / 32];
  __shared__ Run found;
  const Groups& experts = params.experts;
  const uint32_t num_rows = experts.tokens;
  const auto row_blocks = [](uint32_t rows) { return (rows + kRows - 1) / kRows; };  // mutant: one_block_of_rows
  const int32_t offset = min(max(__ldcg(experts.offset), 0), experts.num_sizes);
  uint32_t rows_before = 0, blocks_before = 0;
#pragma unroll 1
  for (int32_t first = 0; first < experts.num_sizes; first += kThreads) {  // mutant: experts_of_the_first_threads
    const int32_t number = first + static_cast<int32_t>(threadIdx.x);
    const int32_t size = number < experts.num_sizes ? __ldcg(experts.sizes + number) : 0;
    // mutant: sizes_below_zero, sizes_beyond_all_but_a_row
    const Range rows =
        block_scan<kThreads>(min(static_cast<uint32_t>(max(size, 0)), num_rows), num_rows, shares[0], &rows_before);
    const uint32_t count = row_blocks(rows.end - rows.begin) * params.column_blocks;
    const Range blocks = block_scan<kThreads>(count, ~0u, shares[1], &blocks_before);
    if (blocks.begin <= tile_idx && tile_idx < blocks.end) {
      const int32_t own = number - offset;  // mutant: weight_of_another
      // mutant: rows_of_no_expert
      found = {own >= 0 && own < experts.count ? own : kNoExpert, rows.begin, rows.end, tile_idx - blocks.begin};
    }
    __syncthreads();  // mutant: what_is_found_not_awaited
    if (tile_idx < blocks_before) break;
  }
  Run run = found;
  if (tile_idx >= blocks_before) {
    run = {kNoExpert, rows_before, num_rows, tile_idx - blocks_before};  // mutant: rows_after_the_last
    if (run.tile_in_run >= row_blocks(num_rows - rows_before) * params.column_blocks) return false;
  }
  // mutant: division_by_0
  const uint32_t blocks = row_blocks(run.row_end - run.row), column_block = run.tile_in_run / blocks;
  work->expert = run.expert;
  work->first_tile = max(run.expert, 0) * params.weight_tiles;  // mutant: weight_of_the_first, one_half_of_a_weight
  work->column_block = column_block;
  work->row = run.row + (run.tile_in_run - column_block * blocks) * kRows;
  work->row_end = run.row_end;  // mutant: rows_without_the_last
  return true;
}

}  // namespace tcgemm::packed
