// Which tiles of a grouped product there are, found on the device from the group sizes there.
#pragma once

#include <cstdint>

#include "tile/groups.cuh"

namespace tcgemm {

// A run of tokens: those of a group, or, group being kNoGroup, rows before the first or after the last.
struct Segment {
  static constexpr int32_t kNoGroup = -1;

  int32_t group;
  int32_t token_begin, token_end;
};

// Where a tile lies among `rows` x `columns` of them: they run down kGroup rows before moving one column
// right, every other such group from the right.
struct SerpentineTile {
  static constexpr int32_t kGroup = 8;

  int32_t row, column;

  __device__ __forceinline__ static SerpentineTile make(int32_t tile_idx, int32_t rows, int32_t columns) {
    const int32_t group_idx = tile_idx / (kGroup * columns);
    const int32_t in_group = tile_idx - group_idx * kGroup * columns;
    const int32_t group_rows = min(rows - group_idx * kGroup, kGroup);
    const int32_t column = in_group / group_rows;
    return {group_idx * kGroup + in_group - column * group_rows, group_idx & 1 ? columns - 1 - column : column};
  }
};

// Walks the segments of the tokens: those before the first group, each group, and the rest. Counter says
// how many tiles a segment has: num_tiles(is_group, tokens). A lane holds one of 32 neighboring segments; tile numbers
// only grow, so the window only moves on.
template <typename Counter>
class SegmentWalk {
 public:
  __device__ __forceinline__ SegmentWalk(const Groups& groups, const Counter& counter)
      : groups_(groups), counter_(counter), lane_(threadIdx.x % 32) {
    first_size_ = min(max(__ldcg(groups.offset), 0), groups.num_sizes);
    uint32_t before = 0;
    for (int32_t i = lane_; i < first_size_; i += 32) before = add(before, size(i));
#pragma unroll
    for (int shift = 16; shift > 0; shift /= 2) before = add(before, __shfl_xor_sync(~0u, before, shift));
    load(0, 0, 0, before);
  }

  // The segment that tile `tile_idx` lies in, and the tile's number inside it. False when there is no
  // such tile. Called by the whole warp with numbers that never fall.
  __device__ __forceinline__ bool find(int32_t tile_idx, Segment* found, int32_t* in_segment) {
    for (;;) {
      const uint32_t passed = __ballot_sync(~0u, tile_end_ <= tile_idx);
      if (passed != ~0u) {
        const int source = __popc(passed);
        const int32_t segment = segment_ + source;
        found->group = segment < 1 || segment > groups_.count ? Segment::kNoGroup : segment - 1;
        found->token_begin = __shfl_sync(~0u, token_begin_, source);
        found->token_end = __shfl_sync(~0u, token_end_, source);
        const int32_t tiles_before = __shfl_sync(~0u, tile_begin_, source);
        *in_segment = tile_idx - tiles_before;
        return true;
      }
      if (segment_ + 32 >= groups_.count + 2) return false;
      load(segment_ + 32, __shfl_sync(~0u, token_end_, 31), __shfl_sync(~0u, tile_end_, 31), 0);
    }
  }

 private:
  // Sums saturate at the number of tokens.
  __device__ __forceinline__ uint32_t add(uint32_t x, uint32_t y) const {
    return min(x + y, static_cast<uint32_t>(groups_.tokens));
  }
  // From L2: this kernel may have begun before the one that wrote the sizes, with an L1 of that time.
  __device__ __forceinline__ uint32_t size(int32_t i) const {
    return i < groups_.num_sizes ? min(max(__ldcg(groups_.sizes + i), 0), groups_.tokens) : 0;
  }

  __device__ __forceinline__ void load(int32_t first, int32_t first_token, int32_t first_tile, uint32_t before) {
    segment_ = first;
    const int32_t segment = first + lane_;
    uint32_t tokens = segment == 0                   ? before
                      : segment <= groups_.count     ? size(first_size_ + segment - 1)
                      : segment == groups_.count + 1 ? static_cast<uint32_t>(groups_.tokens)
                                                     : 0;
#pragma unroll
    for (int shift = 1; shift < 32; shift *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, tokens, shift);
      if (lane_ >= shift) tokens = add(tokens, other);
    }
    token_end_ = add(first_token, tokens);
    token_begin_ = __shfl_up_sync(~0u, token_end_, 1);
    if (lane_ == 0) token_begin_ = first_token;
    const bool is_group = segment >= 1 && segment <= groups_.count;
    int32_t tiles = segment <= groups_.count + 1 ? counter_.num_tiles(is_group, token_end_ - token_begin_) : 0;
#pragma unroll
    for (int shift = 1; shift < 32; shift *= 2) {
      const int32_t other = __shfl_up_sync(~0u, tiles, shift);
      if (lane_ >= shift) tiles += other;
    }
    tile_end_ = first_tile + tiles;
    tile_begin_ = __shfl_up_sync(~0u, tile_end_, 1);
    if (lane_ == 0) tile_begin_ = first_tile;
  }

  Groups groups_;
  Counter counter_;
  int32_t lane_, first_size_, segment_;
  int32_t token_begin_, token_end_, tile_begin_, tile_end_;
};

}  // namespace tcgemm
