// What a tile and its operands decide: the same numbers for a kernel, which is compiled for them, and for its launcher,
// which takes any kernel.
#pragma once

#include "tile/fragment.cuh"
#include "tile/operands.cuh"
#include "tile/swizzle.cuh"

namespace tcgemm::mma {

// What a block computes, and each of its warps. K is counted in bytes of what the instruction multiplies, so that one
// tile serves every type: 128x256 of 128 bytes is 128x256x64 for bf16 and 128x256x128 for s8.
struct Tile {
  int m, n, k_bytes;
  int warp_m, warp_n;
  int stages;
  int min_blocks_per_sm;  // what registers must leave room for; shared memory may allow less on a given device

  constexpr int warps_m() const { return m / warp_m; }
  constexpr int warps_n() const { return n / warp_n; }
  constexpr int threads() const { return warps_m() * warps_n() * 32; }
  // The squares that a symmetric D is divided into: tiles are as long as one along one side of it, and an equal part of
  // it along the other.
  constexpr int symmetric_side() const { return m > n ? m : n; }
};

enum class Role { kA, kB };

// What TMA loads at once.
struct Box {
  int contiguous, rows;
};

// How one operand's tile lies in a stage: K-major, a row for each element of `extent`, along M or N; else a row for
// each k.
struct OperandShape {
  Role role;
  int element_bytes;
  tile::Major major;

  constexpr bool is_k_major() const { return major == tile::Major::kK; }
  constexpr int rows(int extent, int tile_k) const { return is_k_major() ? extent : tile_k; }
  constexpr int row_bytes(int extent, int tile_k) const { return (is_k_major() ? tile_k : extent) * element_bytes; }
  constexpr int bytes(int extent, int tile_k) const { return rows(extent, tile_k) * row_bytes(extent, tile_k); }

  // See operand_tile.cuh for how fragments are loaded.
  constexpr FragmentOrder order() const {
    if (is_k_major() || element_bytes == 2) return FragmentOrder::kConsecutive;
    return element_bytes == 4 && role == Role::kB ? FragmentOrder::kQuads : FragmentOrder::kPairs;
  }
  constexpr ReadPattern pattern() const {
    if (order() == FragmentOrder::kConsecutive) return ReadPattern::kRows8;
    if (order() == FragmentOrder::kQuads) return ReadPattern::kRows4Apart;
    return element_bytes == 1 ? ReadPattern::kRowPairs4 : ReadPattern::kRows4Twice;
  }
  // Whether TMA can write it as the fragment loads want it.
  constexpr bool is_tensor_layout() const { return is_tensor_swizzle(pattern()); }
  // Rows of more than 128 bytes are cut into panels, one after another, where TMA is to write them.
  constexpr int pitch(int extent, int tile_k) const {
    const int bytes = row_bytes(extent, tile_k);
    return is_tensor_layout() && bytes > 128 ? 128 : bytes;
  }
  // A panel: with its swizzle of 128 bytes TMA copies no wider ones.
  constexpr Box box(int extent, int tile_k) const {
    return {pitch(extent, tile_k) / element_bytes, rows(extent, tile_k)};
  }
};

struct Geometry {
  Tile tile;
  int mma_bytes;  // of an element that the instruction takes
  OperandShape a, b;

  constexpr int tile_k() const { return tile.k_bytes / mma_bytes; }
  constexpr int a_bytes() const { return a.bytes(tile.m, tile_k()); }
  constexpr int b_bytes() const { return b.bytes(tile.n, tile_k()); }
  constexpr int stage_bytes() const { return a_bytes() + b_bytes(); }
  constexpr int stages_bytes() const { return tile.stages * stage_bytes(); }
  constexpr int shared_bytes() const { return stages_bytes() + tile.stages * 8; }  // and a barrier for each stage
  constexpr Box a_box() const { return a.box(tile.m, tile_k()); }
  constexpr Box b_box() const { return b.box(tile.n, tile_k()); }
  // Whether TMA can write both tiles, in boxes that are worth it (64-byte rows are not).
  constexpr bool is_tensor_layout() const {
    return a.is_tensor_layout() && b.is_tensor_layout() && tile.k_bytes == 128;
  }
};

}  // namespace tcgemm::mma
