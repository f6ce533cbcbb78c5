// What a tile and a weight's format decide: the same numbers for a kernel, which is compiled for them, and for its
// launcher, which takes any kernel. Geometry is that of kernel.cuh, WideGeometry that of wide_kernel.cuh and
// dequantizing_kernel.cuh.
#pragma once

#include "core/packed_code.h"

namespace tcgemm::packed {

inline constexpr int kTile = 16;         // columns: rows of the instruction's A
inline constexpr int kChunkBytes = 512;  // what a warp loads at once: 16 bytes a lane
inline constexpr int kBlockK = 32;       // rows of the weight of which a lane has eight neighbors
inline constexpr int kUnitBytes = 16;    // what a thread of order_kernel.cuh writes
inline constexpr int kOrderThreads = 256, kWeightThreads = 256;
inline constexpr int kWarpK = 128;  // rows that a warp multiplies in a stage

// Sums of warps of one K, rows of columns, four words apart from a multiple of the banks; and those of the cluster's
// other blocks, of each a share of the rows' columns.
struct Sums {
  int columns, rows, warps_k, cluster;

  constexpr int pitch() const { return columns + 4; }
  constexpr int share_bytes() const { return rows * columns / cluster * 4; }
  constexpr int received_offset() const { return warps_k * rows * pitch() * 4; }
  constexpr int bytes() const { return received_offset() + (cluster - 1) * share_bytes(); }
};

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
  constexpr int blocks() const { return cluster; }  // that find work together
  constexpr Sums sums() const { return {columns, rows(), warps_k, cluster}; }
};

// Of a weight; group 0: whole columns.
struct Format {
  int bits, group;
  bool zero_points;
  PackedCode code;
  int scale_bytes;

  constexpr bool has_table() const { return code == PackedCode::kTable; }
  // Whether multiplication by the scale also corrects the exponent bias of bfloat16 fragments (fragments.cuh).
  constexpr bool has_rebiasing_scales() const {
    return scale_bytes == 1 && code != PackedCode::kInteger && code != PackedCode::kTable;
  }
};

// Pairs of a table's values, a column of banks for each lane.
inline constexpr int kTableBytes = 256 * 32 * 4;

constexpr int larger(int x, int y) { return x > y ? x : y; }

struct Geometry {
  Tile tile;
  Format format;

  constexpr int chunk_k() const { return format.bits == 4 ? 64 : 32; }
  constexpr int chunks_per_warp() const { return kWarpK / chunk_k(); }
  constexpr int groups_per_stage() const { return format.group == 0 ? 0 : tile.stage_k() / format.group; }

  // A stage: values [tile][warp k][chunk], x [block of 32][row][32], scales [tile][group], zero points the same.
  constexpr int values_bytes() const { return tile.tiles() * tile.warps_k * chunks_per_warp() * kChunkBytes; }
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

  // Once all stages have been read, sums are in their place.
  constexpr int ring_bytes() const { return larger(stages() * stage_bytes(), tile.sums().bytes()); }

  // After these: the table, and a barrier.
  constexpr int table_offset() const { return ring_bytes(); }
  constexpr int table_bytes() const { return format.has_table() ? kTableBytes : 0; }
  constexpr int barrier_offset() const { return table_offset() + table_bytes(); }
  constexpr int shared_bytes() const { return barrier_offset() + 16; }

  // Several groups of a stage are open or scaled at once, which takes registers.
  constexpr bool has_small_groups() const {
    const bool is_rebiased = format.group <= kBlockK && format.has_rebiasing_scales();
    return format.group != 0 && format.group < kWarpK && !is_rebiased;
  }

  // What registers must leave room for, where shared memory of sm_90 does.
  constexpr int blocks_per_sm() const {
    const bool fits = tile.threads() <= 256 && 2 * shared_bytes() <= 225 * 1024;
    const bool is_small = tile.token_blocks < (format.has_table() ? 2 : 4);
    return fits && (is_small || (!format.has_table() && !format.zero_points && !has_small_groups())) ? 2 : 1;
  }

  // Whether sixteen warps have too few of them.
  constexpr bool spills() const {
    const bool has_many = format.zero_points || format.has_table() || has_small_groups();
    return tile.threads() > 256 && tile.token_blocks == 4 && has_many;
  }
};

// A CTA tile of many rows. Each consumer warpgroup multiplies 64 columns, a warp the instruction's 16, by all rows. The
// CTAs of a cluster split K, or, where `multicast_size` is 2, have adjacent columns and share their loads of x.
//
// dequantizes: the weight is multiplied by its scales before the product (dequantizing_kernel.cuh), else after it
// (wide_kernel.cuh).
struct WideTile {
  int columns, row_count, cluster, multicast_size;
  bool dequantizes;

  constexpr int tiles() const { return columns / kTile; }
  constexpr int consumer_threads() const { return columns / 64 * 128; }
  // A warpgroup, which leaves its registers to consumers; or none, where two CTAs fit an SM without one alone: then the
  // producer is a thread of the first consumer warp, which waits for what it issues.
  constexpr int producer_threads() const { return dequantizes && row_count == 128 ? 0 : 128; }
  constexpr int threads() const { return consumer_threads() + producer_threads(); }
  constexpr int rows() const { return row_count; }
  constexpr int stage_k() const { return dequantizes ? 64 : 128; }
  constexpr int blocks() const { return cluster * multicast_size; }
  constexpr Sums sums() const { return {columns, rows(), 1, cluster}; }
};

struct WideGeometry {
  WideTile tile;
  Format format;
  int x_size;  // bytes of an element of x

  // A stage: x [128 bytes of k][row][128 bytes] and, where it is dequantized, the weight [column][128 bytes], both
  // swizzled, values [tile][chunk], scales [tile][group], zero points the same. Of groups larger than a stage it has
  // one.
  static constexpr int kSwizzleBytes = 1024;
  constexpr int chunks_per_stage() const { return tile.stage_k() / (format.bits == 4 ? 64 : 32); }
  constexpr int groups_per_stage() const { return format.group == 0 ? 0 : larger(tile.stage_k() / format.group, 1); }
  constexpr int x_bytes() const { return tile.rows() * tile.stage_k() * x_size; }
  constexpr int values_offset() const { return x_bytes(); }
  constexpr int values_bytes() const { return tile.tiles() * chunks_per_stage() * kChunkBytes; }
  constexpr int scales_offset() const { return values_offset() + values_bytes(); }
  constexpr int scales_bytes() const { return tile.tiles() * groups_per_stage() * kTile * format.scale_bytes; }
  constexpr int zeros_offset() const { return scales_offset() + scales_bytes(); }
  constexpr int zeros_bytes() const { return format.zero_points ? tile.tiles() * groups_per_stage() * kTile * 2 : 0; }
  constexpr int loaded_bytes() const { return zeros_offset() + zeros_bytes(); }
  constexpr int stage_bytes() const { return (loaded_bytes() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes; }

  // Of several CTAs on an SM one multiplies while another converts, begins or ends: as many as registers allow.
  constexpr int blocks_per_sm() const {
    return tile.consumer_threads() <= 256 && tile.rows() <= (tile.dequantizes ? 128 : 64) ? 2 : 1;
  }
  constexpr int table_bytes() const { return format.has_table() ? kTableBytes : 0; }
  constexpr int stages() const {
    const int fitting = ((blocks_per_sm() == 2 ? 111 : 224) * 1024 - table_bytes()) / stage_bytes();
    return fitting > 8 ? 8 : fitting;
  }

  // Once all stages have been read, accumulators are in their place.
  constexpr int ring_bytes() const { return larger(stages() * stage_bytes(), tile.sums().bytes()); }
  // After these: the table, and barriers, two for each stage and one of the accumulators.
  constexpr int table_offset() const { return ring_bytes(); }
  constexpr int barrier_offset() const { return table_offset() + table_bytes(); }
  // And room to begin on a multiple of the swizzle, for static variables may come first.
  constexpr int shared_bytes() const { return kSwizzleBytes + barrier_offset() + 8 * (2 * stages() + 1); }

  // Of each thread once its role is known; together what the CTAs had at launch.
  constexpr int producer_registers() const { return 24; }
  constexpr int consumer_registers() const {
    const int at_launch = 65536 / blocks_per_sm() / tile.threads() / 8 * 8 * tile.threads();
    const int each = (at_launch - producer_registers() * tile.producer_threads()) / tile.consumer_threads() / 8 * 8;
    return each < 240 ? each : 240;
  }
};

}  // namespace tcgemm::packed
