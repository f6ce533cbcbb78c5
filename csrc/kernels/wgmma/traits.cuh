// What a config and an element type decide at compile time.
#pragma once

#include <cstdint>

#include "kernels/wgmma/config.h"
#include "kernels/wgmma/params.cuh"

namespace tcgemm::wgmma_family {

template <typename Config, typename In, int kTransA, int kTransB>
struct Traits {
  static constexpr Geometry kGeometry{Config::kShape, sizeof(In), kTransA != 0, kTransB != 0};
  static constexpr int kTileK = kGeometry.tile_k(), kChunk = kGeometry.chunk();
  static constexpr int kMmaK = 32 / sizeof(In);
  static constexpr int kRowsPerGroup = kGeometry.rows_per_group();
  static constexpr int kBlocksM = kRowsPerGroup / 64;
  // TF32 wgmma reads K-major shared memory only. An M-major A goes through registers.
  static constexpr bool kRegisterA = kTransA && sizeof(In) == 4;
  static constexpr int kPaddedN = kGeometry.padded_n();
  static constexpr int kABytes = kGeometry.a_bytes(), kStageBytes = kGeometry.stage_bytes();
  static constexpr int kLoadedBytes = kABytes + kPaddedN * 128;
  static constexpr int kAccumulators = Config::kTileN / 2 * kBlocksM;
  // Of each thread once its role is known, together at most what a block has at launch. The producer
  // needs 40 for multicast; fragments of A need 160 where accumulators are 96.
  static constexpr bool kIsLarge = kAccumulators + (kRegisterA ? 16 * kBlocksM : 0) > 128;
  static constexpr int kProducerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 32 : 40) : (kIsLarge ? 40 : 56);
  static constexpr int kConsumerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 160 : 152) : (kIsLarge ? 232 : 224);
  static constexpr int kStoreBytes = Geometry::kStoreBytes;
  static constexpr int kShares = kGeometry.shares();
  using Share = wgmma_family::Config<Config::kTileM, kGeometry.share_tile_n(), Config::kClusterM, Config::kClusterN,
                                     Config::kClusterK, Config::kPingPong, Config::kSwapped>;
  static constexpr int kStages = kGeometry.stages(), kStagesForTma = kGeometry.stages_for_tma();
  static constexpr int kTmaStoreBuffers = kGeometry.tma_store_buffers();
  static constexpr int kStoreOffset = kGeometry.store_offset();
  static constexpr int kPartialOffset = kGeometry.partial_offset(), kBarrierOffset = kGeometry.barrier_offset();
  static constexpr int kNumBarriers = kGeometry.num_barriers();

  static_assert(Config::kTileM % 64 == 0 && kBlocksM >= 1, "wgmma multiplies 64 rows at a time");
  static_assert(Config::kTileN % 8 == 0 && Config::kTileN <= 256, "the instruction's range of n");
  static_assert(kAccumulators <= kConsumerRegisters - 40, "accumulators must leave registers for the epilogue");
  static_assert(kStages >= 3 && kGeometry.shared_bytes() <= kMaxSharedMemory,
                "one stage loading, one multiplying, one waiting");
  static_assert(Config::kClusterSize <= 8, "portable cluster size");
  static_assert(Config::kClusterK == 1 || kShares > 1 || Config::kClusterK >= Config::kConsumers,
                "no block adds up what two warpgroups have");
  static_assert(!kTransB || sizeof(In) == 2, "B comes from shared memory, N-major in 16-bit types only");
};

}  // namespace tcgemm::wgmma_family
