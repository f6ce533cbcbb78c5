// What CTAs of many rows have in common, whether the weight is multiplied by its scales after the product
// (wide_kernel.cuh) or before it (dequantizing_kernel.cuh): the producer, the barriers and the epilogue.
//
//   D^T[n,m] = w^T[n,k] X^T[k,m] by wgmma.m64nNk16: 16 columns of the weight for each consumer warp, and all rows
//
// The weight is A, from registers, where a warp's fragment is that of mma.m16n8k16. So weights packed for kernel.cuh
// serve as they are. Rows of X are the instruction's n, K-major in shared memory, with k in the weight's order, in
// which order_kernel.cuh has copied X.
//
// Warps 0 to 3 of each 64 columns are a consumer warpgroup. The last four warps are producers, of which one thread
// brings all by TMA: zeros come for what lies outside of x, of the weight's tiles, chunks and groups, so that every
// stage is multiplied in full.
//
// Barriers (arrivals that complete a phase):
//   full[stage]   1 (expect_tx) + the bytes of the stage
//   empty[stage]  1 from each consumer warp of the CTAs that share x
//   accumulators  1 (expect_tx) + the bytes of the accumulators of the cluster's other CTAs
#pragma once

#include <cstdint>

#include "kernels/packed/fragments.cuh"
#include "kernels/packed/geometry.h"
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
template <int kColumns_, int kRows_, int kCluster_, int kMulticastSize_, bool kDequantizes_, bool kGrouped_>
struct WideConfig {
  static constexpr bool kGrouped = kGrouped_;
  static constexpr WideTile kTile{kColumns_, kRows_, kCluster_, kMulticastSize_, kDequantizes_};
  static constexpr Sums kSums = kTile.sums();
  static constexpr int kSumThreads = kTile.consumer_threads();
  static_assert(kColumns_ % 64 == 0 && kRows_ % 8 == 0 && kRows_ <= 256, "the instruction's rows and columns");
  static_assert(kMulticastSize_ == 1 || (kMulticastSize_ == 2 && kCluster_ == 1),
                "two CTAs each load half of x for both");
};

template <int kStages>
struct WideBarriers {
  uint32_t first;  // in shared memory

  __device__ __forceinline__ uint32_t full(int stage) const { return first + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return first + 8 * (kStages + stage); }
  __device__ __forceinline__ uint32_t accumulators() const { return first + 8 * (2 * kStages); }
};

template <typename Config, typename Weight, typename X, typename Epilogue>
class WideBlock {
 public:
  using Scale = typename Weight::Scale;
  static constexpr WideTile kTile = Config::kTile;
  static constexpr WideGeometry kGeometry{kTile, Weight::kFormat, sizeof(X)};
  static constexpr int kStages = kGeometry.stages();
  static constexpr int kConsumerWarps = kTile.consumer_threads() / 32;
  static constexpr int kStageK = kTile.stage_k();
  static constexpr int kChunks = kGeometry.chunks_per_stage(), kGroups = kGeometry.groups_per_stage();
  static constexpr int kBlocks = kStageK / kBlockK;
  // Of x, rows of 128 bytes, of which a stage has two halves or one.
  static constexpr int kRowBytes = 128, kRowK = kRowBytes / sizeof(X), kHalfBytes = kTile.rows() * kRowBytes;
  static constexpr int kCount = kTile.rows() / 2;  // accumulators of a thread
  // Tiles of each of the products that a CTA has columns of.
  static constexpr int kTilesPerProduct = kTile.tiles() / BlockSums<Config, Epilogue>::kSets;
  using Barriers = WideBarriers<kStages>;
  static_assert(kStages >= 3, "one stage loading, one multiplying, one waiting");
  static_assert(kHalfBytes % WideGeometry::kSwizzleBytes == 0, "rows of x are swizzled in groups of eight");

  // What may be done before the kernel that this one depends on has ended: the CTA's barriers.
  static __device__ __forceinline__ void begin(const WideParams& params, uint32_t shared) {
    if (threadIdx.x == 0) {
      init({shared + kGeometry.barrier_offset()});
    } else if (threadIdx.x == 32) {
      ptx::prefetch_tensormap(&params.values);
      ptx::prefetch_tensormap(&params.x);
    }
  }

 protected:
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
        first_tile_(work.first_tile + work.column_block * kTilesPerProduct) {
    const int32_t num_stages = Config::kGrouped && work.has_no_expert() ? 0 : params_.num_stages;
    begin_ = static_cast<int64_t>(num_stages) * rank() / kTile.cluster;
    end_ = static_cast<int64_t>(num_stages) * (rank() + 1) / kTile.cluster;
  }

  // Before roles part: the table, and the barriers of all CTAs of the cluster.
  __device__ __forceinline__ void prepare() const {
    if constexpr (Weight::kHasTable) {
      fill_table<X>(shared_ + kGeometry.table_offset(), params_.table, threadIdx.x, kTile.threads());
    }
    if constexpr (kTile.multicast_size > 1) {
      // The other CTA's barriers, too, are initialised.
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();  // mutant: multicast_not_begun
    }
    __syncthreads();
  }

  // The producer's work, by one thread: loads a stage of the weight to one of the ring that is or becomes free.
  __device__ __forceinline__ void load_stage(int32_t stage, const PipelineState& state) const {
    ptx::mbarrier_wait(barriers_.empty(state.stage), state.phase ^ 1);  // mutant: stages_overwritten
    const uint32_t to = stage_address(state.stage), barrier = barriers_.full(state.stage);
    ptx::mbarrier_arrive_expect_tx(barrier, kGeometry.loaded_bytes());  // mutant: too_few_bytes
#pragma unroll
    for (int tile = 0; tile < kTile.tiles(); tile += kTilesPerProduct) load_weight(to, barrier, stage, tile);
    load_x(to, barrier, stage * kStageK);  // mutant: x_of_the_next_stage
  }

  // The role of the producer's warpgroup: one thread loads, the other warps bring what the epilogue reads to L2.
  __device__ __forceinline__ void run_producers() const {
    ptx::setmaxnreg_dec<kGeometry.producer_registers(), kGeometry.blocks_per_sm()>();
    if (warp_ == kConsumerWarps) {
      if (ptx::elect_one()) produce();
      __syncwarp();
    } else {
      const int first = (kConsumerWarps + 1) * 32;
      prefetch(threadIdx.x - first, kTile.threads() - first);
    }
    // All threads of a cluster arrive once: consumers in finish().
    if constexpr (kTile.cluster > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  }

  // After the last stage has been loaded.
  __device__ __forceinline__ void end_loads(PipelineState state) const {
    // Not earlier: CTAs of the next kernel would take the place of our own.
    ptx::griddepcontrol_launch_dependents();
    if constexpr (kTile.multicast_size > 1) {
      // No CTA may leave while the other one's arrivals are under way.
#pragma unroll 1
      // mutant: multicast_cluster_left
      for (int left = kStages; left > 0; --left, state.advance())
        ptx::mbarrier_wait(barriers_.empty(state.stage), state.phase ^ 1);
    }
  }

  // Brings what the epilogue reads to L2, by `count` threads, of which this is number `thread`.
  __device__ __forceinline__ void prefetch(int thread, int count) const {
    BlockSums<Config, Epilogue>::prefetch(epilogue_, work_, thread, count);
  }

  // Of this CTA in its cluster: along K, and along columns.
  static __device__ __forceinline__ int rank() { return blockIdx.x % kTile.cluster; }
  static __device__ __forceinline__ int column_rank() { return blockIdx.x % kTile.multicast_size; }

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return shared_ + stage * kGeometry.stage_bytes();
  }

  // Also of the CTA's tiles.
  __device__ __forceinline__ int tile() const { return warp_; }
  __device__ __forceinline__ bool has_tile(int tile) const {
    return first_tile_ + tile % kTilesPerProduct < work_.first_tile + params_.tiles;
  }
  // The number in the weight of a tile of the CTA.
  __device__ __forceinline__ int32_t weight_tile(int tile) const {
    return first_tile_ + tile % kTilesPerProduct + tile / kTilesPerProduct * params_.tiles;  // mutant: gate_for_up
  }

  // Address of this lane's column of the table.
  __device__ __forceinline__ uint32_t table() const { return shared_ + kGeometry.table_offset() + lane_ * 4; }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if constexpr (kTile.multicast_size > 1) {
      // mutant: multicast_not_awaited
      if (lane_ < kTile.multicast_size) ptx::mbarrier_arrive_remote(barriers_.empty(stage), lane_);
    } else {
      if (lane_ == 0) ptx::mbarrier_arrive(barriers_.empty(stage));
    }
  }

  // By the scales that columns have beside those of their groups.
  __device__ __forceinline__ void scale_columns(float (&accumulators)[kCount]) const {
    if (params_.column_scales == nullptr || !has_tile(tile())) return;
    // mutant: column_scales_of_the_next_tile
    scale_accumulators(accumulators, params_.column_scales, weight_tile(tile()));
  }

  // Stores the results, once this thread has multiplied all stages.
  __device__ __forceinline__ void finish(const float (&accumulators)[kCount]) const {
    sync_consumers();  // mutant: stages_overwritten_by_accumulators
    // From here on others may write where our stages were, and add to our barrier.
    if constexpr (kTile.cluster > 1) ptx::cluster_arrive_relaxed();
    const BlockSums<Config, Epilogue> sums(shared_);
#pragma unroll
    for (int j = 0; j < kTile.rows() / 8; ++j) sums.put(0, tile(), j, accumulators + 4 * j);
    sync_consumers();  // mutant: accumulators_not_awaited
    if constexpr (kTile.cluster > 1) {
      ptx::cluster_wait();  // mutant: blocks_not_begun
      sums.send(barriers_.accumulators());
      ptx::mbarrier_wait_cluster(barriers_.accumulators(), 0);  // mutant: shares_not_awaited
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
  int32_t begin_, end_;  // stages of this CTA's part of K

 private:
  static __device__ __forceinline__ void init(const Barriers& barriers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers.full(i), 1);
      // mutant: stages_released_by_one_warp
      ptx::mbarrier_init(barriers.empty(i), kConsumerWarps * kTile.multicast_size);
    }
    if constexpr (kTile.cluster > 1) ptx::mbarrier_init(barriers.accumulators(), 1);
    ptx::fence_mbarrier_init();
    if constexpr (kTile.cluster > 1) {
      ptx::mbarrier_arrive_expect_tx(barriers.accumulators(), (kTile.cluster - 1) * Config::kSums.share_bytes());
    }
  }

  __device__ __forceinline__ void produce() const {
    PipelineState state{kStages};
#pragma unroll 1
    for (int32_t stage = begin_; stage < end_; ++stage, state.advance()) load_stage(stage, state);
    end_loads(state);
  }

  static constexpr uint32_t kConsumerBarrier = 1;
  static __device__ __forceinline__ void sync_consumers() {
    ptx::named_barrier_sync(kConsumerBarrier, kTile.consumer_threads());
  }

  // The tiles of one product, of which the first is number `tile` of the CTA.
  __device__ __forceinline__ void load_weight(uint32_t to, uint32_t barrier, int32_t stage, int tile) const {
    const int32_t first = weight_tile(tile);
    ptx::tma_load_4d(to + kGeometry.values_offset() + tile * (kGeometry.values_bytes() / kTile.tiles()), &maps_.values,
                     barrier, 0, stage * kChunks, first, 0);
    if constexpr (kGroups > 0) {
      const int32_t group = stage * kStageK / Weight::kGroup;  // mutant: group_of_another_stage
      ptx::tma_load_4d(to + kGeometry.scales_offset() + tile * (kGeometry.scales_bytes() / kTile.tiles()),
                       &maps_.scales, barrier, 0, group, first, 0);
      if constexpr (Weight::kZeroPoints) {
        ptx::tma_load_4d(to + kGeometry.zeros_offset() + tile * (kGeometry.zeros_bytes() / kTile.tiles()),
                         &maps_.zero_points, barrier, 0, group, first, 0);
      }
    }
  }

  // Of CTAs that share x, a half of K or of the rows, for both.
  __device__ __forceinline__ void load_x(uint32_t to, uint32_t barrier, int32_t k) const {
    constexpr bool kSharesRows = kStageK == kRowK;
    if constexpr (kTile.multicast_size > 1) {
      constexpr int kRows = kSharesRows ? kTile.rows() / 2 : 0, kK = kSharesRows ? 0 : kRowK;
      constexpr int kBytes = kSharesRows ? kHalfBytes / 2 : kHalfBytes;
      const int half = column_rank();
      // mutant: halves_of_x_exchanged, rows_of_x_exchanged
      ptx::tma_load_4d_multicast(to + half * kBytes, &maps_.x, barrier, 3, k + half * kK, work_.row + half * kRows, 0,
                                 0);
    } else {
#pragma unroll
      for (int half = 0; half < kStageK / kRowK; ++half) {
        ptx::tma_load_4d(to + half * kHalfBytes, &maps_.x, barrier, k + half * kRowK, work_.row, 0, 0);
      }
    }
  }
};

// A kernel of a block, a class above: finds the CTA's work and does it.
template <typename Config, typename Block, typename Epilogue>
__device__ __forceinline__ void run_wide(const WideParams& params, const Epilogue& epilogue, uint8_t* shared_memory) {
  constexpr uint32_t kSwizzle = WideGeometry::kSwizzleBytes;
  const uint32_t shared = (ptx::shared_base_address(shared_memory) + kSwizzle - 1) / kSwizzle * kSwizzle;
  Block::begin(params, shared);
  // For the copy of x, and what that has waited for.
  ptx::griddepcontrol_wait();
  Work work;
  if (!find_work<Config>(params.params, &work)) return;
  work.column_block = work.column_block * Config::kTile.multicast_size + blockIdx.x % Config::kTile.multicast_size;
  Block(params, epilogue, work, shared).run();
}

}  // namespace tcgemm::packed
