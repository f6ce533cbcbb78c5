// D[m,n] = sum over k of X[m,k] * w[k,n] for few rows of X and weights of few bits (core/packed_problem.h), for sm_80
// and later; clusters from sm_90 on. Bound by memory: what matters is how many bytes of the weight are under way.
// Rows may be those of experts with a weight each; a CTA finds its own expert, rows and columns (work.cuh).
//
// The product is transposed, D^T = w^T X^T by mma.m16n8k16: the weight is the instruction's A, 16 columns of it at a
// time, converted in registers, and eight rows of X are its B. K is permuted alike in both, so that a lane's
// integers, and its numbers of X, are 16 neighboring bytes each (problem/operands/packed_weight.py).
//
// A block has `columns` columns and 8 * kTokenBlocks rows of X. Each of its warps has 32 of the columns, and of every
// stage 128 rows of the weight; stages come by cp.async, a lane's own integers to where it reads them itself.
// Each scale group has accumulators of its own, which its scale multiplies in float32. For MXFP4, NVFP4 and MXFP8, the
// scale multiplies the weight's fragments instead, which is exact. At the end the accumulators of warps with the same
// columns are added up in order, through shared memory, and then those of the cluster's CTAs, which st.async sends to
// the CTA that stores them.
//
// Shared memory: geometry.h. Barrier: 1 (the receiver's expect_tx) + the bytes of the other CTAs' accumulators.
// Limits: k must be a multiple of 8, so that rows of X are 16-byte aligned.
#pragma once

#include <cstdint>

#include "kernels/packed/fragments.cuh"
#include "kernels/packed/geometry.h"
#include "kernels/packed/params.cuh"
#include "kernels/packed/sums.cuh"
#include "kernels/packed/work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::packed {

// A tile as a type, and whether rows are those of experts.
template <int kColumns_, int kWarpsK_, int kCluster_, int kTokenBlocks_, bool kGrouped_>
struct Config {
  static constexpr bool kGrouped = kGrouped_;
  static constexpr Tile kTile{kColumns_, kWarpsK_, kCluster_, kTokenBlocks_};
  static constexpr Sums kSums = kTile.sums();
  static constexpr int kSumThreads = kTile.threads();
  static_assert(kColumns_ % (packed::kTile * Tile::kTilesPerWarp) == 0, "warps must cover the columns");
};

template <typename X>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<X, __half>) {
    ptx::mma_m16n8k16_f32_f16(d, a[0], a[1], a[2], a[3], b0, b1);
  } else {
    ptx::mma_m16n8k16_f32_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
  }
}

template <typename Config, typename Weight, typename X, typename Epilogue>
class Block {
 public:
  using Scale = typename Weight::Scale;
  using Scales = ScalesOf<Weight, X>;
  static constexpr Tile kTile = Config::kTile;
  static constexpr Geometry kGeometry{kTile, Weight::kFormat};
  static constexpr int kTiles = Tile::kTilesPerWarp, kTokenBlocks = kTile.token_blocks;
  static constexpr int kThreads = kTile.threads(), kStages = kGeometry.stages();
  static constexpr int kChunks = kGeometry.chunks_per_warp();
  static constexpr int kGroups = kGeometry.groups_per_stage();
  static constexpr int kXOffset = kGeometry.values_bytes(), kScalesOffset = kXOffset + kGeometry.x_bytes();
  static constexpr int kZerosOffset = kScalesOffset + kGeometry.scales_bytes();
  // Tiles of the CTA of each product: two products if gated.
  static constexpr int kTilesPerProduct = kTile.tiles() / BlockSums<Config, Epilogue>::kSets;
  static_assert(kTilesPerProduct % kTiles == 0, "a warp's tiles are side by side");

  __device__ __forceinline__ Block(const Params& params, const Epilogue& epilogue, const Work& work, uint32_t shared)
      : params_(params),
        epilogue_(epilogue),
        shared_(shared),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        warp_n_(threadIdx.x / 32 % kTile.warps_n()),
        warp_k_(threadIdx.x / 32 / kTile.warps_n()),
        work_(work) {
    first_tile_ = work.first_tile + work.column_block * kTilesPerProduct;
    const int64_t first_chunk = static_cast<int64_t>(weight_tile(tile_of(0))) * params.chunks + warp_k_ * kChunks;
    values_ = params.values + first_chunk * kChunkBytes + lane_ * 16;
  }

  __device__ __forceinline__ void run() {
    const uint32_t barrier = shared_ + kGeometry.barrier_offset();
    if constexpr (kTile.cluster > 1) {
      if (thread_ == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        // mutant: too_few_bytes
        ptx::mbarrier_arrive_expect_tx(barrier, (kTile.cluster - 1) * Config::kSums.share_bytes());
      }
    }
    const int32_t num_stages = Config::kGrouped && work_.has_no_expert() ? 0 : params_.num_stages;
    const int32_t begin = static_cast<int64_t>(num_stages) * rank() / kTile.cluster;
    const int32_t end = static_cast<int64_t>(num_stages) * (rank() + 1) / kTile.cluster;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load(begin + i, end, i);
    BlockSums<Config, Epilogue>::prefetch(epilogue_, work_, thread_, kThreads);
    if constexpr (Weight::kHasTable)
      fill_table<X>(shared_ + kGeometry.table_offset(), params_.table, thread_, kThreads);
    if constexpr (Weight::kGroup == 0) load_column_zero_points();
    int slot = 0, next = kStages - 1;
#pragma unroll 1
    for (int32_t stage = begin; stage < end; ++stage) {
      ptx::cp_async_wait_group<kStages - 2>();  // mutant: stages_not_awaited
      __syncthreads();                          // mutant: stages_overwritten
      load(stage + kStages - 1, end, next);
      if constexpr (kHasE8M0Scales) {
        // One branch a stage: a branch for each scale would keep instructions from being scheduled across it.
        if (has_large_scale(slot)) {
          multiply_stage<Scales>(slot);
        } else {
          multiply_stage<RebiasingE8M0Scales<Weight>>(slot);
        }
      } else {
        multiply_stage<Scales>(slot);
      }
      next = slot;
      slot = slot + 1 < kStages ? slot + 1 : 0;
    }
    if (Weight::kGroup == 0 && begin < end) scale_columns();
    if constexpr (kScalesFragments) {
#pragma unroll
      for (auto& of_tile : acc_) {
#pragma unroll
        for (auto& acc : of_tile) remove_headroom<Scales>(acc);  // mutant: headroom_not_removed
      }
    }
    if (params_.column_scales != nullptr) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (!has_tile(tile_of(t))) continue;
#pragma unroll
        // mutant: column_scales_of_the_next_tile
        for (auto& acc : acc_[t]) scale_accumulators(acc, params_.column_scales, weight_tile(tile_of(t)));
      }
    }
    __syncthreads();  // mutant: stages_overwritten_by_accumulators
    // From here on others may write where our stages were, and add to our barrier.
    if constexpr (kTile.cluster > 1) ptx::cluster_arrive_relaxed();
    const BlockSums<Config, Epilogue> sums(shared_);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) sums.put(warp_k_, tile_of(t), j, acc_[t][j]);
    }
    __syncthreads();  // mutant: accumulators_not_awaited
    if constexpr (kTile.cluster > 1) {
      ptx::cluster_wait();  // mutant: blocks_not_begun
      sums.send(barrier);
      ptx::mbarrier_wait_cluster(barrier, 0);  // mutant: shares_not_awaited
    }
    sums.store({params_.d, params_.out, params_.n, row_end(), nullptr}, epilogue_, work_);
  }

 private:
  // The CTA's rank in its cluster; read at each use, which saves a register in the main loop.
  static __device__ __forceinline__ int rank() { return blockIdx.x % kTile.cluster; }

  __device__ __forceinline__ uint32_t stage_address(int slot) const { return shared_ + slot * kGeometry.stage_bytes(); }
  __device__ __forceinline__ int tile_of(int t) const { return warp_n_ * kTiles + t; }  // of the block's
  // Address of the lane's column of the lookup table.
  __device__ __forceinline__ uint32_t table() const { return shared_ + kGeometry.table_offset() + lane_ * 4; }
  // Index in the whole weight of a tile of the CTA, and whether the weight has that tile.
  __device__ __forceinline__ int32_t weight_tile(int tile) const {
    return first_tile_ + tile % kTilesPerProduct + tile / kTilesPerProduct * params_.tiles;  // mutant: gate_for_up
  }
  __device__ __forceinline__ bool has_tile(int tile) const {
    return first_tile_ + tile % kTilesPerProduct < work_.first_tile + params_.tiles;  // mutant: columns_of_the_next
  }
  __device__ __forceinline__ int32_t row_end() const { return Config::kGrouped ? work_.row_end : params_.m; }

  // Commits a group of copies also where there is no such stage, so that cp_async_wait_group counts stages.
  __device__ __forceinline__ void load(int32_t stage, int32_t end, int slot) {
    if (stage < end) {
      const uint32_t to = stage_address(slot);
      load_values(stage, to);
      load_x(stage, to + kXOffset);
      if constexpr (kGroups > 0) {
        load_per_group(params_.scales, kTile16 * sizeof(Scale), stage, to + kScalesOffset);
        if constexpr (Weight::kZeroPoints) load_per_group(params_.zero_points, kTile16 * 2, stage, to + kZerosOffset);
      }
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ uint32_t values_address(uint32_t stage, int t, int chunk) const {
    return stage + ((tile_of(t) * kTile.warps_k + warp_k_) * kChunks + chunk) * kChunkBytes + lane_ * 16;
  }

  __device__ __forceinline__ void load_values(int32_t stage, uint32_t to) {
    constexpr int kStageChunks = kTile.warps_k * kChunks;
    const uint8_t* from = values_ + static_cast<int64_t>(stage) * (kStageChunks * kChunkBytes);
    const int32_t num_left = params_.chunks - (stage * kStageChunks + warp_k_ * kChunks);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const bool is_tile = has_tile(tile_of(t));
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        ptx::cp_async_16(values_address(to, t, chunk), from + chunk * kChunkBytes, is_tile && chunk < num_left);
      }
      from += static_cast<int64_t>(params_.chunks) * kChunkBytes;
    }
  }

  // Layout [k-block of 32][row][lane % 4], 16 bytes each, in the order in which lanes read them. A thread copies the
  // same row each time, since the threads copy whole k-blocks.
  __device__ __forceinline__ void load_x(int32_t stage, uint32_t to) {
    constexpr int kUnits = kGeometry.x_bytes() / 16, kStep = kThreads / (4 * kTile.rows()) * kBlockK;
    static_assert(kThreads % (4 * kTile.rows()) == 0, "the threads copy whole k-blocks");
    const int32_t k = stage * kTile.stage_k() + thread_ / (4 * kTile.rows()) * kBlockK + thread_ % 4 * 8;
    const int32_t row = work_.row + thread_ / 4 % kTile.rows();  // mutant: x_of_the_first
    const X* from = static_cast<const X*>(params_.x) + (static_cast<int64_t>(row) * params_.k + k);
#pragma unroll
    for (int i = 0; i < (kUnits + kThreads - 1) / kThreads; ++i) {
      if (kUnits % kThreads != 0 && i * kThreads + thread_ >= kUnits) break;
      const bool is_inside = row < row_end() && k + i * kStep < params_.k;  // mutant: x_beyond_k
      ptx::cp_async_16(to + (i * kThreads + thread_) * 16, from + i * kStep, is_inside);
    }
  }

  // Layout [tile][group], `bytes` each, copied in units of 16 bytes.
  __device__ __forceinline__ void load_per_group(const uint8_t* values, int bytes, int32_t stage, uint32_t to) {
    const int per_group = bytes / 16, units = kTile.tiles() * kGroups * per_group;
#pragma unroll 1
    for (int unit = thread_; unit < units; unit += kThreads) {
      const int tile_idx = unit / (kGroups * per_group), rest = unit - tile_idx * kGroups * per_group;
      const int32_t group = stage * kGroups + rest / per_group;
      const uint8_t* from =
          values + (static_cast<int64_t>(weight_tile(tile_idx)) * params_.groups + stage * kGroups) * bytes + rest * 16;
      ptx::cp_async_16(to + unit * 16, from, has_tile(tile_idx) && group < params_.groups);
    }
  }

  // Return whether one of this warp's scales in the stage is too large for RebiasingE8M0Scales. A lane tests four
  // scales.
  __device__ __forceinline__ bool has_large_scale(int slot) const {
    constexpr int kTileWords = kWarpK / kBlockK * kTile16 / 4;
    static_assert(!kHasE8M0Scales || kTileWords * kTiles == 32, "a word of scales for each lane");
    const int place = group_place(lane_ / kTileWords, 0) * kTile16 + lane_ % kTileWords * 4;
    const uint32_t four = ptx::ld_shared_u32(stage_address(slot) + kScalesOffset + place);
    return __any_sync(0xFFFFFFFFu, RebiasingE8M0Scales<Weight>::has_large(four));
  }

  template <typename StageScales>
  __device__ __forceinline__ void multiply_stage(int slot) {
    const uint32_t stage = stage_address(slot);
    constexpr int kBlocksPerChunk = kWarpK / kChunks / kBlockK;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 integers[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) integers[t] = ptx::ld_shared_v4_u32(values_address(stage, t, chunk));
#pragma unroll
      for (int i = 0; i < kBlocksPerChunk; ++i) {
        const int block = chunk * kBlocksPerChunk + i;  // of the warp's four in the stage
        uint4 x[kTokenBlocks];
#pragma unroll
        for (int j = 0; j < kTokenBlocks; ++j) {
          const int place = (warp_k_ * (kWarpK / kBlockK) + block) * kTokenBlocks + j;
          x[j] = ptx::ld_shared_v4_u32(stage + kXOffset + place * 512 + lane_ * 16);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (Weight::kGroup > 0 && block * kBlockK % group_size() == 0) begin_group(stage, block, t);
          const uint32_t words[4] = {integers[t].x, integers[t].y, integers[t].z, integers[t].w};
          const uint32_t (&zeros)[2] = zeros_[Weight::kZeroPoints ? t : 0];
          Fragments fragments;
          if constexpr (kScalesFragments) {
            const auto scales = load_fragment_scales<StageScales, Scale>(scales_address(stage, block, t));
            scales.dequantize(words, i * kSteps, zeros, table(), fragments);
          } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              convert_step<Weight, X>(words, i * kSteps + step, zeros, table(), fragments[step]);
            }
          }
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int j = 0; j < kTokenBlocks; ++j) {
              const uint32_t b[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
              multiply<X>(group_acc(t)[j], fragments[step], b[2 * step], b[2 * step + 1]);
            }
          }
          if (kHasGroupAcc && (block + 1) * kBlockK % group_size() == 0) end_group(stage, block, t);
        }
      }
    }
  }

  // Whether scales multiply fragments, not accumulators: for groups of 16 rows, since every MMA has rows of two groups,
  // and where the multiplication also corrects the exponent bias.
  static constexpr bool kScalesFragments =
      Weight::kGroup == 16 || (Weight::kGroup == kBlockK && kHasRebiasingScales<Weight, X>);
  // Whether stages without large scales can take RebiasingE8M0Scales.
  static constexpr bool kHasE8M0Scales =
      Weight::kGroup == kBlockK && kHasRebiasingScales<Weight, X> && std::is_same_v<Scale, ptx::E8M0>;
  static constexpr bool kHasGroupAcc = Weight::kGroup > 0 && !kScalesFragments;

  // Not 0, so that nothing is divided by it where it is not meant.
  static constexpr __device__ int group_size() { return Weight::kGroup > 0 ? Weight::kGroup : kWarpK; }

  // Sets of group accumulators. Groups of at most one k-block end before the next tile's begin, so that tiles share
  // one.
  static constexpr int kGroupAccSets = Weight::kGroup <= kBlockK ? 1 : kTiles;

  __device__ __forceinline__ float (&group_acc(int t)) [kTokenBlocks][4] {
    if constexpr (kHasGroupAcc) {
      return group_acc_[t % kGroupAccSets];
    } else {
      return acc_[t];
    }
  }

  // Index of a scale group of this warp among those of the stage.
  __device__ __forceinline__ int group_place(int t, int block) const {
    const int first = tile_of(t) * kGroups + warp_k_ * (kWarpK / group_size()) + block * kBlockK / group_size();
    return Weight::kGroup == 16 ? first + lane_ % 4 / 2 : first;  // mutant: first_group_of_a_block
  }

  // Address of the scales of this lane's two columns.
  __device__ __forceinline__ uint32_t scales_address(uint32_t stage, int block, int t) const {
    // mutant: scale_of_the_next_group
    const int place = group_place(t, block) * 16 + lane_ / 4 * 2;
    return stage + kScalesOffset + place * static_cast<int>(sizeof(Scale));
  }

  __device__ __forceinline__ void begin_group(uint32_t stage, int block, int t) {
#pragma unroll
    for (int j = 0; kHasGroupAcc && j < kTokenBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) group_acc(t)[j][i] = 0.0f;
    }
    if constexpr (Weight::kZeroPoints) {
      // mutant: zeros_of_the_other_column
      set_zeros(t, ptx::ld_shared_u32(stage + kZerosOffset + group_place(t, block) * 32 + lane_ / 4 * 4));
    }
  }

  __device__ __forceinline__ void set_zeros(int t, uint32_t both) { zero_point_terms<Weight, X>(both, zeros_[t]); }

  __device__ __forceinline__ void end_group(uint32_t stage, int block, int t) {
    const float2 scales = load_float_scales<Scale>(scales_address(stage, block, t));
#pragma unroll
    for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_[t][j][i] += (i < 2 ? scales.x : scales.y) * group_acc(t)[j][i];
    }
  }

  // Without groups, each column has one zero point.
  __device__ __forceinline__ void load_column_zero_points() {
    if constexpr (Weight::kZeroPoints) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int64_t tile = weight_tile(tile_of(t));
        const auto* zeros = reinterpret_cast<const uint32_t*>(params_.zero_points) + tile * 8;
        set_zeros(t, has_tile(tile_of(t)) ? zeros[lane_ / 4] : 0);
      }
    }
  }

  __device__ __forceinline__ void scale_columns() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!has_tile(tile_of(t))) continue;
      const int64_t tile = weight_tile(tile_of(t));
      const auto* scales = reinterpret_cast<const Scale*>(params_.scales) + tile * 16;
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_[t][j][i] *= float_of(scales[lane_ / 4 * 2 + i / 2]);
      }
    }
  }

  static constexpr int kTile16 = packed::kTile;

  const Params& params_;
  const Epilogue& epilogue_;
  const uint32_t shared_;
  const int thread_, lane_, warp_n_, warp_k_;
  const Work work_;
  int32_t first_tile_;
  const uint8_t* values_;  // of this lane in the warp's first tile
  float acc_[kTiles][kTokenBlocks][4] = {};
  float group_acc_[kGroupAccSets][kTokenBlocks][4];  // of the current scale groups, not yet scaled
  // Zero-point terms of columns g and g + 8; of all tiles the same where there are no zero points.
  uint32_t zeros_[kTiles][2] = {
      {zero_point_term<X, Weight::kBits>(Weight::kZero), zero_point_term<X, Weight::kBits>(Weight::kZero)}};
};

template <typename Config, typename Weight, typename X, typename Epilogue>
__global__ void __launch_bounds__(Config::kTile.threads(),
                                  Block<Config, Weight, X, Epilogue>::kGeometry.blocks_per_sm())
    kernel(const __grid_constant__ Params params, const __grid_constant__ Epilogue epilogue) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared_memory[];
  Work work;
  if (!find_work<Config>(params, &work)) return;
  Block<Config, Weight, X, Epilogue>(params, epilogue, work, ptx::shared_base_address(shared_memory)).run();
#else
  __trap();  // cp.async and this mma shape begin with sm_80.
#endif
}

}  // namespace tcgemm::packed
