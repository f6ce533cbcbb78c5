// The tiles of a grid whose blocks live as long as there are some, and their order.
#pragma once

#include <cstdint>

#include "tile/divisor.cuh"

namespace tcgemm {

// In units of what a cluster computes at once. Inside a batch entry, the walk takes the tiles of a group along the
// longer side of D before it moves one on along the shorter, every other group backwards: neighbors in time share
// both operands' panels in L2.
struct PersistentGrid {
  static constexpr int32_t kLargest = 0x7fffffff;

  bool n_is_longer;
  int32_t longer, shorter, num_tiles;  // along D's sides, and in all
  // Where the last tiles begin at most. What lies outside an operand takes TMA eight times as long as what lies
  // inside, so they overlap the ones before them, and some elements are computed twice, to the same bits.
  int32_t last_m, last_n;
  Divisor per_batch, per_group, last_group;  // tiles of a batch entry and of a group; how wide the last group is
  Divisor batch, batch_inner;

  struct Place {
    int32_t batch_idx, m_idx, n_idx;  // D's batch: each split of K has one of its own
  };

  // `along`: the width of a group. Tiles do not overlap.
  static PersistentGrid make(bool n_is_longer, int64_t tiles_m, int64_t tiles_n, int64_t along, int64_t batch,
                             int64_t batch_inner, int64_t num_splits) {
    const int64_t longer = n_is_longer ? tiles_n : tiles_m, shorter = n_is_longer ? tiles_m : tiles_n;
    PersistentGrid grid{};
    grid.n_is_longer = n_is_longer;
    grid.longer = static_cast<int32_t>(longer);
    grid.shorter = static_cast<int32_t>(shorter);
    grid.num_tiles = static_cast<int32_t>(tiles_m * tiles_n * batch * num_splits);
    grid.last_m = grid.last_n = kLargest;
    grid.per_batch = Divisor(tiles_m * tiles_n);
    // Past the tiles of a batch entry, as it may be, it divides to 0, as it must.
    const int64_t per_group = along * shorter;
    grid.per_group = Divisor(per_group < kLargest ? per_group : kLargest);
    grid.last_group = Divisor(longer - (longer - 1) / along * along);
    grid.batch = Divisor(batch);
    grid.batch_inner = Divisor(batch_inner);
    return grid;
  }

  // Divides by multiplying: the producer's first load and every short tile wait.
  template <int32_t kAlong>
  __device__ __forceinline__ Place at(int32_t tile_idx) const {
    const int32_t batch_idx = per_batch.divide(tile_idx);
    const int32_t in_batch = tile_idx - batch_idx * longer * shorter;
    const int32_t group_idx = per_group.divide(in_batch), first = group_idx * kAlong;
    const int32_t in_group = in_batch - first * shorter;
    const bool is_full = first + kAlong <= longer;
    const int32_t step = is_full ? static_cast<uint32_t>(in_group) / kAlong : last_group.divide(in_group);
    const int32_t width = is_full ? kAlong : longer - first;
    const int32_t along_longer = first + in_group - step * width;
    const int32_t along_shorter = group_idx & 1 ? shorter - 1 - step : step;
    return {batch_idx, n_is_longer ? along_shorter : along_longer, n_is_longer ? along_longer : along_shorter};
  }
};

}  // namespace tcgemm
