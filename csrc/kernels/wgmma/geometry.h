// What a config and its operands decide: the same numbers for a kernel, which is compiled for them, and for its
// launcher, which takes any kernel.
#pragma once

#include <cstdint>

#include "tile/operands.cuh"

namespace tcgemm::wgmma_family {

// tile_m x tile_n: output tile of one block.
// cluster_m x cluster_n blocks share operand tiles by multicast: the blocks along M share B, those along N share A.
// cluster_k blocks split K among them and add up through distributed shared memory. ping_pong: each consumer
// warpgroup has a tile of its own and stores it while the other one multiplies; otherwise all work on parts of one
// tile. swapped: the problem is transposed (D^T = B^T A^T), so that a skinny M becomes the flexible N of the
// instruction.
struct Shape {
  int tile_m, tile_n;
  int cluster_m, cluster_n, cluster_k;
  bool ping_pong, swapped;

  constexpr int cluster_size() const { return cluster_m * cluster_n * cluster_k; }
  // Warpgroups that multiply; three for 192 rows, of which a wgmma takes 64.
  constexpr int consumers() const { return !ping_pong && tile_m % 128 != 0 ? tile_m / 64 : 2; }
  constexpr int threads() const { return 128 * (1 + consumers()); }
  constexpr int rows_per_group() const { return ping_pong ? tile_m : tile_m / consumers(); }
  constexpr int accumulators_per_thread() const { return tile_n / 2 * (rows_per_group() / 64); }
  // In how many parts, one after the other, a tile is multiplied whose accumulators are promoted: each part has
  // accumulators until it is done, beside the float32 accumulators of all. 0: a thread has not the registers for it.
  constexpr int promoted_parts() const {
    const int most = consumers() == 3 ? 112 : 192, accs = accumulators_per_thread();
    if (2 * accs <= (most < 128 ? most : 128)) return 1;
    return accs + accs / 2 <= most && tile_n % 16 == 0 ? 2 : 0;
  }
  // Where the second part begins if it is of columns; 0: there is none.
  constexpr int promoted_column() const { return promoted_parts() == 2 && rows_per_group() == 64 ? tile_n / 2 : 0; }
  // Whether it multiplies by the two matrices of a gated product: each block of a pair loads one matrix's half of the
  // tile, 64 columns or more.
  constexpr bool runs_gated() const { return !swapped && tile_n % 128 == 0 && cluster_m == 2; }
  // The squares that a symmetric D is divided into: a cluster's tiles are as long as one along one side of it, and an
  // equal part of it along the other. 0: none.
  constexpr int symmetric_side() const {
    const int rows = tile_m * cluster_m, columns = tile_n * cluster_n, longer = rows > columns ? rows : columns;
    const bool divides = longer % rows == 0 && longer % columns == 0;
    return swapped || !divides ? 0 : longer;
  }
  // Inside a batch entry, the walk takes this many tiles along the longer side of D before it moves one on along the
  // other. Blocks without clusters fill one GPC after the other, 16 SMs that get a line of L2 together if they ask for
  // it at about the same time: of four by four tiles each panel goes to four. Clusters are dealt to GPCs in turns, so
  // that every eighth lies in the same one.
  constexpr int tiles_along_longer() const { return cluster_size() == 1 ? 4 : 8; }
};

inline constexpr int kMaxSharedMemory = 232448;
// Depth of a k block of 8-bit elements; the depth of block scales is a multiple of it.
inline constexpr int kScaledDepth = 128;

// What TMA loads at once.
struct Box {
  int contiguous, rows;
};

// How one operand's tile lies in a stage: in rows of 128 bytes, which are swizzled. K-major, a row for each element of
// `extent`, along M or N; else, for each chunk of it, a row for each k.
struct OperandShape {
  int element_bytes;
  tile::Major major;
  int scaled_rows = 0;  // rows that share a block scale; then the stages hold the scales, too

  constexpr bool is_k_major() const { return major == tile::Major::kK; }
  constexpr int chunk() const { return 128 / element_bytes; }  // elements of a row
  constexpr int padded(int extent) const { return is_k_major() ? extent : (extent + chunk() - 1) / chunk() * chunk(); }
  constexpr int bytes(int extent, int tile_k) const { return padded(extent) * tile_k * element_bytes; }
  // Number of block scales for one k block of a tile.
  constexpr int num_scales(int extent) const { return scaled_rows == 0 ? 0 : (extent + scaled_rows - 1) / scaled_rows; }
  // Box of one TMA load where `multicast` CTAs each load an equal part of the tile for all of them.
  constexpr Box box(int extent, int tile_k, int multicast) const {
    return is_k_major() ? Box{tile_k, extent / multicast} : Box{chunk(), tile_k / multicast};
  }
};

struct Geometry {
  Shape shape;
  OperandShape a, b;

  static constexpr int kStoreBytes = 8192;
  // As deep as shared memory allows; deeper than this never measured faster.
  static constexpr int kMaxStages = 12;

  // One row of the swizzle.
  constexpr int tile_k() const { return a.chunk() < b.chunk() ? a.chunk() : b.chunk(); }
  constexpr int a_bytes() const { return a.bytes(shape.tile_m, tile_k()); }
  constexpr int b_bytes() const { return (b.bytes(shape.tile_n, tile_k()) + 1023) / 1024 * 1024; }
  constexpr int stage_bytes() const { return a_bytes() + b_bytes(); }
  // Bytes of a stage's block scales.
  constexpr int scale_bytes() const {
    return (4 * (a.num_scales(shape.tile_m) + b.num_scales(shape.tile_n)) + 15) / 16 * 16;
  }
  constexpr Box a_box() const { return a.box(shape.tile_m, tile_k(), shape.cluster_n); }
  constexpr Box b_box() const { return b.box(shape.tile_n, tile_k(), shape.cluster_m); }

  // Of a cluster that splits K each block adds up a share of the columns of every warpgroup's tile or, where a share
  // would be narrower than the 16 that are stored at once, all that one of the warpgroups has.
  constexpr int shares() const { return shape.tile_n % (16 * shape.cluster_k) == 0 ? shape.cluster_k : 1; }
  constexpr int share_tile_n() const { return shape.tile_n / shares(); }
  constexpr int shared_groups() const { return shares() == 1 ? 1 : shape.consumers(); }  // whose tiles it has shares of
  constexpr int partial_bytes() const {
    return (shape.cluster_k - 1) * shared_groups() * shape.rows_per_group() * share_tile_n() * 4;
  }

  constexpr int fixed_bytes() const { return shape.consumers() * 2 * kStoreBytes + partial_bytes(); }
  constexpr int fitting_stages(int fixed) const {
    // Barriers; and what kernels without block scales were tuned with.
    const int rest = scale_bytes() > 0 ? 256 : 2048;
    const int fitting = (kMaxSharedMemory - rest - fixed) / (stage_bytes() + scale_bytes());
    return fitting < kMaxStages ? fitting : kMaxStages;
  }
  constexpr int stages() const { return fitting_stages(fixed_bytes()); }
  // Threads store a D whose rows start anywhere through both of a warpgroup's store buffers. For TMA one is enough,
  // and makes room for a fourth stage; a fifth or sixth is not worth the stores that wait for each other.
  constexpr int stages_for_tma() const {
    return stages() < 4 && shape.cluster_k == 1 ? fitting_stages(shape.consumers() * kStoreBytes) : stages();
  }
  constexpr int tma_store_buffers() const { return stages_for_tma() > stages() ? 1 : 2; }

  // Shared memory, from a 1024-byte boundary: stages, store buffers, other blocks' products, block scales, barriers.
  constexpr int store_offset() const { return stages() * stage_bytes(); }
  constexpr int partial_offset() const { return store_offset() + shape.consumers() * 2 * kStoreBytes; }
  constexpr int scale_offset() const {
    const int end = store_offset() + fixed_bytes();
    const int end_for_tma = stages_for_tma() * stage_bytes() + shape.consumers() * tma_store_buffers() * kStoreBytes;
    return end > end_for_tma ? end : end_for_tma;
  }
  constexpr int barrier_offset() const { return scale_offset() + stages_for_tma() * scale_bytes(); }
  constexpr int num_barriers() const { return 2 * stages_for_tma() + 3 * shape.consumers(); }
  constexpr int shared_bytes() const { return barrier_offset() + 8 * num_barriers(); }
};

// How 64 rows of a tile are staged and stored: in turns across the tile's columns, each of one box, or of two side by
// side when the problem is swapped and the 64 rows are wider than the swizzle (float32).
struct StoreBox {
  int columns;  // along D's contiguous dimension: as many as the swizzle allows without reaching past the tile
  int rows, row_bytes;
  int count;  // side by side

  static constexpr StoreBox make(bool swapped, int tile_n, int out_bytes) {
    const int along = swapped ? 64 : tile_n, widest = 128 / out_bytes;
    const int columns = along >= widest ? widest : along >= widest / 2 ? widest / 2 : widest / 4;
    const int count = swapped ? 64 / columns : 1, most_rows = 64 / count;
    return {columns, swapped && tile_n < most_rows ? tile_n : most_rows, columns * out_bytes, count};
  }
};

}  // namespace tcgemm::wgmma_family
