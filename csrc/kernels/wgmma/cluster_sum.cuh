// How the blocks of a cluster that split K add up their products of one tile.
//
// Each block receives the others' products of a share of the tile, adds them up with its own, and stores
// the sum. It adds in pairs, (0 + 1) + (2 + 3) by ranks, which gives the same bits whoever does it: where
// tiles overlap it depends on the tile. Products come by st.async, whose bytes the receiver's barrier
// counts: a release to the cluster would be a memory barrier for the whole GPU.
//
// Barriers, one of each for each consumer warpgroup (arrivals that complete a phase):
//   full    1 (the receiver's expect_tx) + the bytes of the other blocks' products
//   empty   1 from each block that we send to: it has read what we sent
#pragma once

#include <cstdint>

#include "kernels/wgmma/traits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

namespace tcgemm::wgmma_family {

template <typename T>
class ClusterSum {
 public:
  using Config = typename T::Config;
  using Share = typename T::Share;
  static constexpr int kRanks = Config::kClusterK, kShares = T::kShares;

  // Of consumer warpgroup `consumer`.
  __device__ __forceinline__ ClusterSum(uint32_t shared, uint32_t cta_rank, int consumer)
      : full_(first_barrier(shared) + 8 * consumer),
        empty_(full_ + 8 * Config::kConsumers),
        received_(shared + T::kPartialOffset + (kShares == 1 ? 0 : consumer * (kRanks - 1) * kShareBytes)),
        rank_(cta_rank),
        owner_(consumer * kRanks / Config::kConsumers) {}

  // By one thread of the block, before the cluster's first barrier.
  static __device__ __forceinline__ void init(uint32_t shared) {
    const uint32_t full = first_barrier(shared);
    for (int i = 0; i < Config::kConsumers; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(full + 8 * (Config::kConsumers + i), kShares == 1 ? 1 : kRanks - 1);
    }
  }

  // First column of our share of the tile.
  __device__ __forceinline__ int first_column() const { return kShares == 1 ? 0 : rank_ * Share::kTileN; }

  // Sends the other blocks their shares and adds up ours, if we have one.
  __device__ __forceinline__ bool add_up(const float (&acc)[T::kBlocksM][Config::kTileN / 2],
                                         float (&share)[T::kBlocksM][Share::kTileN / 2], int thread_idx,
                                         uint32_t barrier_id) {
    const bool sends = kShares > 1 || rank_ != owner_;
    if (sends) {
      ptx::mbarrier_wait(empty_, phase_ ^ 1);
      // Each block begins with another one, so that all receive at once.
#pragma unroll 1
      for (int step = 1; step < (kShares == 1 ? 2 : kRanks); ++step) {
        const int next = rank_ + step, target = kShares == 1 ? owner_ : next < kRanks ? next : next - kRanks;
        take(acc, share, target);
        send(share, target, thread_idx);
      }
    }
    if (kShares == 1 && sends) {
      phase_ ^= 1;
      return false;
    }

    take(acc, share, rank_);
    if (thread_idx == 0) ptx::mbarrier_arrive_expect_tx(full_, (kRanks - 1) * kShareBytes);
    ptx::mbarrier_wait_cluster(full_, phase_);  // mutant: shares_not_awaited
    phase_ ^= 1;
    const auto received = [&](int slot, int i) {
      return ptx::ld_shared_v4_f32(received_ + slot * kShareBytes + (i * 128 + thread_idx) * 16);
    };
    for_each_four(share, [&](float* x, int i) {
      const float4 y = received(0, i);
      add(x, y);
    });
    if constexpr (kRanks == 4) {
      for_each_four(share, [&](float* x, int i) {
        const float4 y = received(1, i), z = received(2, i);
        float pair[4] = {y.x, y.y, y.z, y.w};
        add(pair, z);  // mutant: one_of_a_pair
        add(x, {pair[0], pair[1], pair[2], pair[3]});
      });
    }
    ptx::named_barrier_sync(barrier_id, 128);  // mutant: shares_overwritten
    if (thread_idx < kRanks && thread_idx != rank_) ptx::mbarrier_arrive_remote(empty_, thread_idx);
    return true;
  }

  // Waits for the last arrivals at our barriers: no block may leave before.
  __device__ __forceinline__ void drain() const {
    if (kShares > 1 || rank_ != owner_) ptx::mbarrier_wait(empty_, phase_ ^ 1);
  }

 private:
  static_assert(kRanks == 1 || kRanks == 2 || kRanks == 4, "others would be added up in another order");
  static constexpr int kShareBytes = T::kBlocksM * Share::kTileN / 2 * 128 * 4;

  static __device__ __forceinline__ uint32_t first_barrier(uint32_t shared) {
    return shared + T::kBarrierOffset + 8 * (2 * T::kStages + Config::kConsumers);
  }

  static __device__ __forceinline__ void add(float* x, const float4& y) {
    const float values[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (T::kIsInteger) {  // mutant: added_up_as_floats
        x[i] = __uint_as_float(__float_as_uint(x[i]) + __float_as_uint(values[i]));
      } else {
        x[i] += values[i];
      }
    }
  }

  // The share of block `rank`, by an index that the compiler knows.
  static __device__ __forceinline__ void take(const float (&acc)[T::kBlocksM][Config::kTileN / 2],
                                              float (&share)[T::kBlocksM][Share::kTileN / 2], int rank) {
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      if (kShares > 1 && i != rank) continue;
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
        for (int j = 0; j < Share::kTileN / 2; ++j) share[block][j] = acc[block][i * (Share::kTileN / 2) + j];
      }
    }
  }

  template <typename F>
  static __device__ __forceinline__ void for_each_four(float (&share)[T::kBlocksM][Share::kTileN / 2], F f) {
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
      for (int i = 0; i < Share::kTileN / 8; ++i) f(&share[block][4 * i], block * (Share::kTileN / 8) + i);
    }
  }

  __device__ __forceinline__ void send(float (&share)[T::kBlocksM][Share::kTileN / 2], int target,
                                       int thread_idx) const {
    // That of the other block of the receiver's pair comes first, then the other pair's.
    const int slot = (rank_ ^ target) - 1;
    const uint32_t to = ptx::mapa(received_ + slot * kShareBytes + thread_idx * 16, target);
    const uint32_t barrier = ptx::mapa(full_, target);
    for_each_four(share,
                  [&](const float* x, int i) { ptx::st_async_v4(to + i * 2048, x[0], x[1], x[2], x[3], barrier); });
  }

  const uint32_t full_, empty_;
  const uint32_t received_;
  const int rank_, owner_;  // in the cluster
  uint32_t phase_ = 0;
};

}  // namespace tcgemm::wgmma_family
