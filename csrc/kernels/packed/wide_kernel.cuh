// D[m,n] = sum over k of X[m,k] * w[k,n] for more rows of X than kernel.cuh multiplies at once, for sm_90a. From some
// fifty rows on it is tensor cores that take the time, and mma.sync gives two thirds of them at most.
//
// The product is transposed, D^T = w^T X^T by wgmma.m64nNk16: the weight is A, from registers, where a warp's fragment
// is that of mma.m16n8k16. So weights packed for kernel.cuh serve as they are, a tile of 16 columns for each warp. Rows
// of X are the instruction's n, K-major in shared memory. There k must be in the weight's order; order_kernel.cuh has
// copied X so.
//
// X of 8-bit floats is multiplied by integers as 8-bit floats, which hold them exactly; what a tensor core adds up of
// these is added to sums in float32 when a group, or 128 of K, ends. Rows of X have scales of their own, which sums are
// multiplied by at the end.
//
// Warps 0 to 3 of each 64 columns are a consumer warpgroup. Of 32 rows of the weight it converts the fragments of two
// instructions while those of the last 32 multiply. Sums of a group are kept apart, and are multiplied by its scale in
// float32. The last four warps are producers, of which one thread brings all by TMA: zeros come for what lies outside
// of x, of the weight's tiles, pieces and groups, so that every stage is multiplied in full.
//
// Shared memory: WideGeometry. Barriers (arrivals that complete a phase):
//   full[stage]    1 (expect_tx) + the bytes of the stage
//   empty[stage]   1 from each consumer warp of the blocks that share x
//   sums           1 (expect_tx) + the bytes of the cluster's other blocks' sums
#pragma once

#include <cstdint>

#include "kernels/packed/geometry.h"
#include "kernels/packed/pieces.cuh"
#include "kernels/packed/sums.cuh"
#include "kernels/packed/wide_params.cuh"
#include "kernels/packed/work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/pipeline.cuh"

namespace tcgemm::packed {

// A tile as a type, and whether rows are those of experts.
template <int kColumns_, int kRows_, int kCluster_, int kSharers_, bool kGrouped_>
struct WideConfig {
  static constexpr bool kGrouped = kGrouped_;
  static constexpr WideTile kTile{kColumns_, kRows_, kCluster_, kSharers_};
  static constexpr Sums kSums = kTile.sums();
  static constexpr int kSumThreads = kTile.consumer_threads();
  static_assert(kColumns_ % 64 == 0 && kRows_ % 8 == 0 && kRows_ <= 256, "the instruction's rows and columns");
  static_assert(kSharers_ == 1 || (kSharers_ == 2 && kCluster_ == 1), "each of two blocks loads half of x for both");
};

template <int kStages>
struct WideBarriers {
  uint32_t first;  // in shared memory

  __device__ __forceinline__ uint32_t full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return first + 8 * (kStages + stage); }
  __device__ __forceinline__ uint32_t sums() const { return first + 8 * (2 * kStages); }
};

template <typename Config, typename Weight, typename X, typename Epilogue>
class WideBlock {
 public:
  using Scale = typename Weight::Scale;
  static constexpr WideTile kTile = Config::kTile;
  static constexpr WideGeometry kGeometry{kTile, Weight::kFormat, sizeof(X)};
  static constexpr int kStages = kGeometry.stages(), kConsumerWarps = kTile.consumer_threads() / 32;
  static constexpr int kPieces = kGeometry.pieces_per_stage(), kGroups = kGeometry.groups_per_stage();
  static constexpr int kBlocks = WideTile::kStageK / kBlockK;
  // Of x, rows of 128 bytes, of which a stage has two halves or one.
  static constexpr int kRowBytes = 128, kRowK = kRowBytes / sizeof(X), kHalfBytes = kTile.rows() * kRowBytes;
  static constexpr int kSteps = kBlockK * sizeof(X) / 32;  // instructions for a block of K
  // Whether sums of a group, or of a stage, are apart, of how much of K, and how many units what is multiplied is.
  static constexpr bool kHasParts = Weight::kGroup > 0 || kIsFloat8<X>;
  static constexpr int kPartK = Weight::kGroup > 0 ? Weight::kGroup : WideTile::kStageK;
  static constexpr float kUnit = kIsFloat8<X> ? 1 / kFloat8Unit : 1;
  static constexpr int kCount = kTile.rows() / 2;  // sums of a thread
  // Tiles of each of the products that a block has columns of.
  static constexpr int kSetTiles = kTile.tiles() / BlockSums<Config, Epilogue>::kSets;
  using Barriers = WideBarriers<kStages>;
  static_assert(kStages >= 3, "one stage loading, one multiplying, one waiting");
  static_assert(kHalfBytes % WideGeometry::kSwizzleBytes == 0, "rows of x are swizzled in groups of eight");

  __device__ __forceinline__ WideBlock(const WideParams& params, const Epilogue& epilogue, const Work& work,
                                       uint32_t shared)
      : maps_(params),
        params_(params.params),
        epilogue_(epilogue),
        work_(work),
        shared_(shared),
        barriers_{shared + kGeometry.barrier_offset()},
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)),  // the same in a whole warp, as the compiler then knows
        lane_(threadIdx.x % 32),
        first_tile_(work.first_tile + work.column_block * kSetTiles) {
    const int32_t num_stages = Config::kGrouped && work.is_of_none() ? 0 : params_.num_stages;
    begin_ = static_cast<int64_t>(num_stages) * rank() / kTile.cluster;
    end_ = static_cast<int64_t>(num_stages) * (rank() + 1) / kTile.cluster;
  }

  // What may be done before the copy of x is complete: the block's barriers.
  static __device__ __forceinline__ void begin(const WideParams& params, uint32_t shared) {
    if (threadIdx.x == 0) {
      init({shared + kGeometry.barrier_offset()});
    } else if (threadIdx.x == 32) {
      ptx::prefetch_tensormap(&params.values);
      ptx::prefetch_tensormap(&params.x);
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Weight::kTable) {
      fill_table<X>(shared_ + kGeometry.table_offset(), params_.table, threadIdx.x, kTile.threads());
    }
    if constexpr (kTile.sharers > 1) {
      // The other block's barriers, too, are initialised.
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();  // mutant: multicast_not_begun
    }
    __syncthreads();
    if (warp_ >= kConsumerWarps) {
      ptx::setmaxnreg_dec<kGeometry.producer_registers(), kGeometry.blocks_per_sm()>();
      if (warp_ == kConsumerWarps) {
        if (ptx::elect_one()) produce();
        __syncwarp();
      } else {
        const int first = (kConsumerWarps + 1) * 32;
        BlockSums<Config, Epilogue>::prefetch(epilogue_, work_, threadIdx.x - first, kTile.threads() - first);
      }
      if constexpr (kTile.cluster > 1) {
        ptx::cluster_arrive_relaxed();
        ptx::cluster_wait();
      }
    } else {
      ptx::setmaxnreg_inc<kGeometry.consumer_registers(), kGeometry.blocks_per_sm()>();
      consume();
      sync_consumers();  // mutant: stages_overwritten_by_sums
      finish();
    }
  }

 private:
  // Of this block in its cluster: along K, and along columns.
  static __device__ __forceinline__ int rank() { return blockIdx.x % kTile.cluster; }
  static __device__ __forceinline__ int column_rank() { return blockIdx.x % kTile.sharers; }

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return shared_ + stage * kGeometry.stage_bytes();
  }

  static __device__ __forceinline__ void init(const Barriers& barriers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers.full(i), 1);
      ptx::mbarrier_init(barriers.empty(i), kConsumerWarps * kTile.sharers);  // mutant: stages_released_by_one_warp
    }
    if constexpr (kTile.cluster > 1) ptx::mbarrier_init(barriers.sums(), 1);
    ptx::fence_mbarrier_init();
    if constexpr (kTile.cluster > 1) {
      ptx::mbarrier_arrive_expect_tx(barriers.sums(), (kTile.cluster - 1) * Config::kSums.share_bytes());
    }
  }

  // --- the producer -------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() const {
    PipelineState state{kStages};
#pragma unroll 1
    for (int32_t stage = begin_; stage < end_; ++stage, state.advance()) {
      ptx::mbarrier_wait(barriers_.empty(state.stage), state.phase ^ 1);  // mutant: stages_overwritten
      const uint32_t to = stage_address(state.stage), barrier = barriers_.full(state.stage);
      ptx::mbarrier_arrive_expect_tx(barrier, kGeometry.loaded_bytes());  // mutant: too_few_bytes
#pragma unroll
      for (int tile = 0; tile < kTile.tiles(); tile += kSetTiles) load_weight(to, barrier, stage, tile);
      load_x(to, barrier, stage * WideTile::kStageK);  // mutant: x_of_the_next_stage
    }
    // Not earlier: blocks of the next kernel would take the place of our own.
    ptx::griddepcontrol_launch_dependents();
    if constexpr (kTile.sharers > 1) {
      // No block may leave while the other one's arrivals are under way.
#pragma unroll 1
      // mutant: multicast_cluster_left
      for (int left = kStages; left > 0; --left, state.advance())
        ptx::mbarrier_wait(barriers_.empty(state.stage), state.phase ^ 1);
    }
  }

  // The tiles of one product, of which the first is number `tile` of the block.
  __device__ __forceinline__ void load_weight(uint32_t to, uint32_t barrier, int32_t stage, int tile) const {
    const int32_t first = weight_tile(tile);
    ptx::tma_load_4d(to + kGeometry.values_offset() + tile * (kGeometry.values_bytes() / kTile.tiles()), &maps_.values,
                     barrier, 0, stage * kPieces, first, 0);
    if constexpr (kGroups > 0) {
      ptx::tma_load_4d(to + kGeometry.scales_offset() + tile * (kGeometry.scales_bytes() / kTile.tiles()),
                       &maps_.scales, barrier, 0, stage * kGroups, first, 0);
      if constexpr (Weight::kZeroPoints) {
        ptx::tma_load_4d(to + kGeometry.zeros_offset() + tile * (kGeometry.zeros_bytes() / kTile.tiles()),
                         &maps_.zero_points, barrier, 0, stage * kGroups, first, 0);
      }
    }
  }

  // Of blocks that share x, a half of K or of the rows, for both.
  __device__ __forceinline__ void load_x(uint32_t to, uint32_t barrier, int32_t k) const {
    constexpr bool kSharesRows = kIsFloat8<X>;
    if constexpr (kTile.sharers > 1) {
      constexpr int kRows = kSharesRows ? kTile.rows() / 2 : 0, kK = kSharesRows ? 0 : kRowK;
      constexpr int kBytes = kSharesRows ? kHalfBytes / 2 : kHalfBytes;
      const int half = column_rank();
      // mutant: halves_of_x_exchanged, rows_of_x_exchanged
      ptx::tma_load_4d_multicast(to + half * kBytes, &maps_.x, barrier, 3, k + half * kK, work_.row + half * kRows, 0,
                                 0);
    } else {
#pragma unroll
      for (int half = 0; half < WideTile::kStageK / kRowK; ++half) {
        ptx::tma_load_4d(to + half * kHalfBytes, &maps_.x, barrier, k + half * kRowK, work_.row, 0, 0);
      }
    }
  }

  // --- consumers ----------------------------------------------------------------------------------

  // Also of the block's tiles.
  __device__ __forceinline__ int tile() const { return warp_; }
  __device__ __forceinline__ bool has_tile() const {
    return first_tile_ + tile() % kSetTiles < work_.first_tile + params_.tiles;
  }
  // The number in the weight of a tile of the block.
  __device__ __forceinline__ int32_t weight_tile(int tile) const {
    return first_tile_ + tile % kSetTiles + tile / kSetTiles * params_.tiles;  // mutant: gate_for_up
  }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if constexpr (kTile.sharers > 1) {
      // mutant: multicast_not_awaited
      if (lane_ < kTile.sharers) ptx::mbarrier_arrive_remote(barriers_.empty(stage), lane_);
    } else {
      if (lane_ == 0) ptx::mbarrier_arrive(barriers_.empty(stage));
    }
  }

  __device__ __forceinline__ void consume() {
    if constexpr (Weight::kGroup == 0 && Weight::kZeroPoints) {
      const auto* zeros = reinterpret_cast<const uint32_t*>(params_.zero_points);
      // mutant: zeros_of_the_next_tile
      const int64_t place = static_cast<int64_t>(weight_tile(tile())) * 8 + lane_ / 4;
      subtrahends<Weight, X>(has_tile() ? zeros[place] : 0, zeros_);
    }
#pragma unroll
    for (float& sum : sums_) sum = 0.0f;
    PipelineState state{kStages};
#pragma unroll 1
    for (int32_t stage = begin_; stage < end_; ++stage, state.advance()) {
      ptx::mbarrier_wait(barriers_.full(state.stage), state.phase);  // mutant: stages_not_awaited
      multiply_stage(stage_address(state.stage));
      release(state.stage);
    }
    if constexpr (Weight::kGroup == 0) scale_columns();
  }

  // Returns when all is multiplied: ptxas serialises instructions on registers that are filled in the loop's next turn.
  __device__ __forceinline__ void multiply_stage(uint32_t stage) {
    constexpr int kBlocksPerPiece = kBlocks / kPieces;
    const uint64_t x = ptx::swizzle_128b_descriptor(stage, 0, 1024);
    const uint32_t values = stage + kGeometry.values_offset() + tile() * (kPieces * kPieceBytes) + lane_ * 16;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 integers = ptx::ld_shared_v4_u32(values + piece * kPieceBytes);
      const uint32_t words[4] = {integers.x, integers.y, integers.z, integers.w};
#pragma unroll
      for (int i = 0; i < kBlocksPerPiece; ++i) {
        const int block = piece * kBlocksPerPiece + i;  // of the stage's four
        const bool begins = kHasParts && block * kBlockK % kPartK == 0;
        const bool ends = kHasParts && (block + 1) * kBlockK % kPartK == 0;
        if (Weight::kZeroPoints && Weight::kGroup > 0 && begins) {
          // mutant: zeros_of_the_next_column
          const uint32_t zeros = stage + kGeometry.zeros_offset() + group_place(block) * 32 + lane_ / 4 * 4;
          subtrahends<Weight, X>(ptx::ld_shared_u32(zeros), zeros_);
        }
        uint32_t fragments[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          convert_step<Weight, X>(words, i * kSteps + step, zeros_, table(), fragments[step]);
        }
        const int first_k = block * kBlockK;
        // mutant: halves_of_k_exchanged, blocks_of_k_exchanged, blocks_of_k_of_8_bits
        const uint64_t x_block =
            x + ((first_k / kRowK * kHalfBytes + first_k % kRowK * static_cast<int>(sizeof(X))) >> 4);
        ptx::wgmma_fence_operand(open_sums());
        ptx::wgmma_fence();  // mutant: registers_not_fenced
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          // mutant: steps_exchanged, group_not_begun
          ptx::wgmma_m64k32b<X, X>(open_sums(), fragments[step], x_block + step * (32 >> 4), !begins || step != 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_fence_operand(open_sums());
        if (ends) {
          end_group(stage, block);
        } else if (block < kBlocks - 1) {
          ptx::wgmma_wait_group<1>();
        } else {
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_fence_operand(open_sums());
        }
      }
    }
  }

  __device__ __forceinline__ float (&open_sums()) [kCount] {
    if constexpr (kHasParts) {
      return part_;
    } else {
      return sums_;
    }
  }

  // That of this lane.
  __device__ __forceinline__ uint32_t table() const {
    return shared_ + kGeometry.table_offset() + lane_ * 4;
  }

  // Where a group of this warp's columns lies among those of the stage.
  __device__ __forceinline__ int group_place(int block) const { return tile() * kGroups + block * kBlockK / kPartK; }

  __device__ __forceinline__ void end_group(uint32_t stage, int block) {
    float2 scales = make_float2(1, 1);
    if constexpr (Weight::kGroup > 0) {
      // mutant: scale_of_the_next_group
      const uint32_t place = (group_place(block) * 16 + lane_ / 4 * 2) * static_cast<uint32_t>(sizeof(Scale));
      scales = load_scales<Scale>(stage + kGeometry.scales_offset() + place);
      scales = make_float2(kUnit * scales.x, kUnit * scales.y);  // mutant: units_forgotten
    }
    ptx::wgmma_wait_group<0>();  // mutant: groups_not_awaited
    ptx::wgmma_fence_operand(part_);
#pragma unroll
    // mutant: scales_of_columns_exchanged
    for (int i = 0; i < kCount; ++i) sums_[i] += (i % 4 < 2 ? scales.x : scales.y) * part_[i];
  }

  __device__ __forceinline__ void scale_columns() {
    if (begin_ == end_ || !has_tile()) return;
    // mutant: scales_of_the_next_tile
    const int64_t place = static_cast<int64_t>(weight_tile(tile())) * 16 + lane_ / 4 * 2;
    const auto* both = reinterpret_cast<const Scale*>(params_.scales) + place;
    const float scales[2] = {kUnit * tcgemm::convert<float>(both[0]), kUnit * tcgemm::convert<float>(both[1])};
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums_[i] *= scales[i % 4 / 2];
  }

  // --- what consumers end with --------------------------------------------------------------------

  static constexpr uint32_t kConsumerBarrier = 1;
  static __device__ __forceinline__ void sync_consumers() {
    ptx::named_barrier_sync(kConsumerBarrier, kTile.consumer_threads());
  }

  // Once all of them have read all stages.
  __device__ __forceinline__ void finish() {
    // From here on others may write where our stages were, and add to our barrier.
    if constexpr (kTile.cluster > 1) ptx::cluster_arrive_relaxed();
    const BlockSums<Config, Epilogue> sums(shared_);
#pragma unroll
    for (int j = 0; j < kTile.rows() / 8; ++j) sums.put(0, tile(), j, sums_ + 4 * j);
    sync_consumers();  // mutant: sums_not_awaited
    if constexpr (kTile.cluster > 1) {
      ptx::cluster_wait();  // mutant: blocks_not_begun
      sums.send(barriers_.sums());
      ptx::mbarrier_wait_cluster(barriers_.sums(), 0);  // mutant: shares_not_awaited
    }
    const int32_t row_end = Config::kGrouped ? work_.row_end : params_.m;
    sums.store({params_.d, params_.out, params_.n, row_end, params_.row_scales}, epilogue_, work_);
  }

  const WideParams& maps_;
  const Params& params_;
  const Epilogue& epilogue_;
  const Work work_;
  const uint32_t shared_;
  const Barriers barriers_;
  const int warp_, lane_;
  const int32_t first_tile_;
  int32_t begin_, end_;  // stages of this block's part of K
  // What a thread has of 16 columns: of 8 rows the four sums of an instruction's D.
  float sums_[kCount];
  float part_[kCount];  // of a group, or of a stage
  // Subtrahends of columns g and g + 8.
  uint32_t zeros_[2] = {subtrahend<X, Weight::kBits>(Weight::kZero), subtrahend<X, Weight::kBits>(Weight::kZero)};
};

template <typename Config, typename Weight, typename X, typename Epilogue>
__global__ void __launch_bounds__(Config::kTile.threads(),
                                  WideBlock<Config, Weight, X, Epilogue>::kGeometry.blocks_per_sm())
    wide_kernel(const __grid_constant__ WideParams params, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  constexpr uint32_t kSwizzle = WideGeometry::kSwizzleBytes;
  const uint32_t shared = (ptx::shared_base_address(shared_memory) + kSwizzle - 1) / kSwizzle * kSwizzle;
  using Block = WideBlock<Config, Weight, X, Epilogue>;
  Block::begin(params, shared);
  // For the copy of x, and what that has waited for.
  ptx::griddepcontrol_wait();
  Work work;
  if (!find_work<Config>(params.params, &work)) return;
  work.column_block = work.column_block * Config::kTile.sharers + blockIdx.x % Config::kTile.sharers;
  Block(params, epilogue, work, shared).run();
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::packed
