// What kernels of this family begin and end with: their barriers, the ring of stages, the start of a block.
#pragma once

#include <cstdint>

#include "kernels/wgmma/traits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/pipeline.cuh"

namespace tcgemm::wgmma_family {

// Initialises the barriers of a block of kernel.cuh while warp 0 looks for what to load first.
inline constexpr int kInitializingWarp = 1;
// This warp and the next load the block scales of the operands.
inline constexpr int kFirstScaleWarp = 2, kScaleThreads = 64;

// Rank of this block in its cluster. A grid of single blocks is launched without clusters.
template <typename Config>
__device__ __forceinline__ uint32_t cluster_rank() {
  return Config::kClusterSize == 1 ? 0 : ptx::cluster_ctarank();
}

// Stages of a kernel's ring: a constant but where TMA storing D makes room for more.
template <typename T, typename Epilogue>
__device__ __forceinline__ int num_stages(const Params<Epilogue>& params) {
  return T::kStagesForTma == T::kStages ? T::kStages : params.stages;
}

// The barriers between the producer and the consumers of a block, and between those; see kernel.cuh.
template <typename T>
struct Pipeline {
  using Config = typename T::Config;

  uint32_t barriers;  // the first one

  __device__ __forceinline__ explicit Pipeline(uint32_t shared) : barriers(shared + T::kBarrierOffset) {}

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (T::kStagesForTma + stage); }
  __device__ __forceinline__ uint32_t order(int group) const { return barriers + 8 * (2 * T::kStagesForTma + group); }

  // Each warp of a consumer by itself says that a stage is free, where its threads read what others do not.
  static constexpr int kReleases = T::kIsScaled ? 4 : 1;

  // By one thread. Its fence_mbarrier_init is left to the caller, who may have barriers of its own.
  // `loaders`: arrivals at `full`.
  __device__ __forceinline__ void init(int loaders = 1) const {
    constexpr int kReaders = Config::kPingPong ? 1 : Config::kConsumers;
    // The blocks that load into our stage or receive our multicast lie in our row and column of
    // the cluster; we are in both.
    constexpr int kPeers = Config::kClusterM + Config::kClusterN - 1;
    for (int i = 0; i < T::kStagesForTma; ++i) {
      ptx::mbarrier_init(full(i), loaders);
      ptx::mbarrier_init(empty(i), kReaders * kPeers * kReleases);  // mutant: released_by_one_warp
    }
    for (int i = 0; i < Config::kConsumers; ++i) ptx::mbarrier_init(order(i), 4);
  }

  // By the producer, where it stands after its last load: waits until all stages have been released. No
  // block may leave while other blocks' arrivals and multicasts to it are under way, and these are the last.
  __device__ __forceinline__ void drain(PipelineState state) const {
    if constexpr (Config::kMulticast > 1) {
#pragma unroll 1
      for (int i = 0; i < state.stages; ++i, state.advance()) ptx::mbarrier_wait(empty(state.stage), state.phase ^ 1);
    }
  }

  // Lets ping-pong's other consumer multiply. By each warp for itself: the turn cannot come back before all
  // four have seen that it came.
  __device__ __forceinline__ void pass_turn(int consumer, int thread_idx) const {
    __syncwarp();
    if (thread_idx % 32 == 0) ptx::mbarrier_arrive(order(consumer ^ 1));
  }
};

// How a block of kernel.cuh begins once its barriers are initialised. All of it, and what comes before, runs while the
// kernel before us on the stream still does.
template <typename T>
struct BlockStart {
  using Config = typename T::Config;

  // By all threads, those of kInitializingWarp after one of them has initialised the barriers.
  static __device__ __forceinline__ void arrive(int warp) {
    if constexpr (Config::kClusterSize > 1) {
      ptx::cluster_arrive_relaxed();
    } else if (warp == kInitializingWarp) {
      __syncwarp();
      ptx::named_barrier_arrive(kProducerBarrier, kProducerThreads);
      ptx::named_barrier_arrive(kConsumerBarrier, kConsumerThreads);
    }
  }
  // By all threads. Those of the loading warps and of the consumers may then use the barriers of all blocks.
  static __device__ __forceinline__ void wait(int warp) {
    if constexpr (Config::kClusterSize > 1) {
      ptx::cluster_wait();
    } else if (warp == 0 || (T::kIsScaled && warp >= kFirstScaleWarp && warp < 4)) {
      ptx::named_barrier_sync(kProducerBarrier, kProducerThreads);
    } else if (warp >= 4) {
      ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    }
    ptx::griddepcontrol_wait();
  }

 private:
  // Loading warps wait for the initialising one only.
  static constexpr uint32_t kProducerBarrier = 14, kProducerThreads = 64 + (T::kIsScaled ? kScaleThreads : 0);
  static constexpr uint32_t kConsumerBarrier = 15, kConsumerThreads = 32 + 128 * Config::kConsumers;
};

}  // namespace tcgemm::wgmma_family
