// What a tile and a weight's format decide: the same numbers for a kernel, which is compiled for them, and for its
// launcher, which takes any kernel.
#pragma once

namespace tcgemm::packed {

inline constexpr int kTile = 16;         // columns: rows of the instruction's A
inline constexpr int kPieceBytes = 512;  // what a warp loads at once: 16 bytes a lane
inline constexpr int kBlockK = 32;       // rows of the weight of which a lane has eight neighbours
inline constexpr int kWarpK = 128;       // rows that a warp multiplies in a stage

// A block multiplies 8 * token_blocks rows of x by `columns` columns. Its warps share columns, and every stage's rows
// of the weight; the blocks of a cluster share K.
struct Tile {
  int columns, warps_k, cluster;
  int token_blocks;

  static constexpr int kTilesPerWarp = 2;
  constexpr int tiles() const { return columns / kTile; }
  constexpr int warps_n() const { return tiles() / kTilesPerWarp; }
  constexpr int threads() const { return warps_n() * warps_k * 32; }
  constexpr int rows() const { return 8 * token_blocks; }
  constexpr int stage_k() const { return warps_k * kWarpK; }
};

// Of a weight; group 0: whole columns.
struct Format {
  int bits, group;
  bool zero_points, table;
  int scale_bytes;
};

struct Geometry {
  Tile tile;
  Format format;

  constexpr int piece_k() const { return format.bits == 4 ? 64 : 32; }
  constexpr int pieces_per_warp() const { return kWarpK / piece_k(); }
  constexpr int groups_per_stage() const { return format.group == 0 ? 0 : tile.stage_k() / format.group; }

  // A stage: values [tile][warp k][piece], x [block of 32][row][32], scales [tile][group], zero points the same.
  constexpr int values_bytes() const { return tile.tiles() * tile.warps_k * pieces_per_warp() * kPieceBytes; }
  constexpr int x_bytes() const { return tile.rows() * tile.stage_k() * 2; }
  constexpr int scales_bytes() const { return tile.tiles() * groups_per_stage() * kTile * format.scale_bytes; }
  constexpr int zeros_bytes() const { return format.zero_points ? tile.tiles() * groups_per_stage() * kTile * 2 : 0; }
  constexpr int stage_bytes() const { return values_bytes() + x_bytes() + scales_bytes() + zeros_bytes(); }

  // Two blocks of eight warps fit an SM of sm_90, or one of sixteen; a block of eight also one of sm_86. Three stages
  // are worth more than that.
  constexpr int stages() const {
    const int fitting = (tile.threads() <= 256 ? 96 : 192) * 1024 / stage_bytes();
    if (fitting >= 3) return fitting > 8 ? 8 : fitting;
    return 3 * stage_bytes() <= 192 * 1024 ? 3 : 2;
  }

  // Once all stages have been read, in their place: sums of warps of one K, rows of columns, four words apart from a
  // multiple of the banks; and those of the cluster's other blocks.
  constexpr int sums_pitch() const { return tile.columns + 4; }
  constexpr int sums_bytes() const { return tile.warps_k * tile.rows() * sums_pitch() * 4; }
  constexpr int share_bytes() const { return tile.rows() * tile.columns / tile.cluster * 4; }
  constexpr int received_offset() const { return sums_bytes(); }
  constexpr int received_bytes() const { return tile.cluster > 1 ? tile.cluster * share_bytes() : 0; }
  constexpr int ring_bytes() const {
    const int ring = stages() * stage_bytes(), all_sums = received_offset() + received_bytes();
    return ring > all_sums ? ring : all_sums;
  }

  // After these: the table's pairs, a column of banks for each lane; a barrier.
  constexpr int table_offset() const { return ring_bytes(); }
  constexpr int table_bytes() const { return format.table ? 256 * 32 * 4 : 0; }
  constexpr int barrier_offset() const { return table_offset() + table_bytes(); }
  constexpr int shared_bytes() const { return barrier_offset() + 16; }

  // Several groups of a stage are open or scaled at once, which takes registers.
  constexpr bool has_small_groups() const { return format.group != 0 && format.group < kWarpK; }

  // What registers must leave room for, where shared memory of sm_90 does.
  constexpr int blocks_per_sm() const {
    const bool fits = tile.threads() <= 256 && 2 * shared_bytes() <= 225 * 1024;
    const bool is_small = tile.token_blocks < (format.table ? 2 : 4);
    return fits && (is_small || (!format.table && !format.zero_points && !has_small_groups())) ? 2 : 1;
  }

  // Whether sixteen warps have too few of them.
  constexpr bool spills() const {
    const bool has_many = format.zero_points || format.table || has_small_groups();
    return tile.threads() > 256 && tile.token_blocks == 4 && has_many;
  }
};

}  // namespace tcgemm::packed
