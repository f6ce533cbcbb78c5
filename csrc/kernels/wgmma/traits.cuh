// What a config and an element type decide at compile time, and the arguments of a launch.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tile/divisor.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wgmma_family {

inline constexpr int kMaxSharedMemory = 232448;

// The epilogue of a kernel that stores the product as it is. The other one is Fused (fused_store.cuh).
struct Bare {
  static constexpr bool kFused = false;
};

// Inside a batch entry, the walk takes this many tiles along the longer side of D before it moves one on along the
// other. Blocks without clusters fill one GPC after the other, 16 SMs that get a line of L2 together if they ask for
// it at about the same time: of four by four tiles each panel goes to four. Clusters are dealt to GPCs in turns, so
// that every eighth lies in the same one.
template <typename Config>
inline constexpr int32_t kTilesAlongLonger = Config::kClusterSize == 1 ? 4 : 8;

// The tiles of a launch, in units of what a cluster computes at once.
struct Grid {
  bool n_is_longer;
  int32_t longer, shorter, num_tiles;  // along D's sides, and in all
  // Where the last tiles begin at most. What lies outside an operand takes TMA eight times as long as what lies
  // inside, so they overlap the ones before them, and some elements are computed twice, to the same bits.
  int32_t last_m, last_n;
  Divisor per_batch, per_group, last_group;  // tiles of a batch entry and of a group; how wide the last group is
  Divisor batch, batch_inner;
};

template <typename Epilogue>
struct Params {
  CUtensorMap a_map, b_map, d_map;
  int32_t m, n, k;
  int32_t batch, batch_inner;
  Grid grid;
  // 0 where an operand is broadcast along that level, else 1.
  int32_t a_outer, a_inner, b_outer, b_inner;
  int32_t num_splits;  // parts of K written as separate batches of D
  // Each block multiplies this many k blocks of a tile, at least one; the part number 0 of K begins at the k block
  // `first_k_block`. Past the end of K they load zeros.
  int32_t k_blocks, first_k_block;
  FloatType out_type;
  bool store_with_tma;
  int32_t stages;  // of the ring, where that is not Traits::kStages
  void* d;
  int64_t ldd;  // of D as stored, packed batches of rows_d * ldd
  Epilogue epilogue;
};

template <typename Config, typename In, int kTransA, int kTransB>
struct Traits {
  static constexpr int kTileK = 128 / sizeof(In);  // one 128-byte swizzle row
  static constexpr int kMmaK = 32 / sizeof(In);
  static constexpr int kRowsPerGroup = Config::kPingPong ? Config::kTileM : Config::kTileM / Config::kConsumers;
  static constexpr int kBlocksM = kRowsPerGroup / 64;
  static constexpr int kChunk = 128 / sizeof(In);  // elements of a 128-byte row along M or N
  // TF32 wgmma reads K-major shared memory only. An M-major A goes through registers.
  static constexpr bool kRegisterA = kTransA && sizeof(In) == 4;
  static constexpr int kPaddedN = kTransB ? (Config::kTileN + kChunk - 1) / kChunk * kChunk : Config::kTileN;
  static constexpr int kABytes = Config::kTileM * 128;
  static constexpr int kBBytes = (kPaddedN * 128 + 1023) / 1024 * 1024;
  static constexpr int kLoadedBytes = kABytes + kPaddedN * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kAccumulators = Config::kTileN / 2 * kBlocksM;
  // Of each thread once its role is known, together at most what a block has at launch. The producer
  // needs 40 for multicast; fragments of A need 160 where accumulators are 96.
  static constexpr bool kIsLarge = kAccumulators + (kRegisterA ? 16 * kBlocksM : 0) > 128;
  static constexpr int kProducerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 32 : 40) : (kIsLarge ? 40 : 56);
  static constexpr int kConsumerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 160 : 152) : (kIsLarge ? 232 : 224);
  static constexpr int kStoreBytes = 8192;
  // Of a cluster that splits K each block adds up a share of the columns of every warpgroup's tile or, where a
  // share would be narrower than the 16 that are stored at once, all that one of the warpgroups has.
  static constexpr int kShares = Config::kTileN % (16 * Config::kClusterK) == 0 ? Config::kClusterK : 1;
  using Share = wgmma_family::Config<Config::kTileM, Config::kTileN / kShares, Config::kClusterM, Config::kClusterN,
                                     Config::kClusterK, Config::kPingPong, Config::kSwapped>;
  static constexpr int kSharedGroups = kShares == 1 ? 1 : Config::kConsumers;  // whose tiles a block has shares of
  static constexpr int kPartialBytes =
      (Config::kClusterK - 1) * kSharedGroups * kRowsPerGroup * Config::kTileN / kShares * 4;

  static constexpr int kFixedBytes = Config::kConsumers * 2 * kStoreBytes + kPartialBytes;

  // As deep as shared memory allows; deeper than kMaxStages never measured faster.
  static constexpr int kMaxStages = 12;
  static constexpr int fitting_stages(int fixed_bytes) {
    const int fitting = (kMaxSharedMemory - 2048 - fixed_bytes) / kStageBytes;
    return fitting < kMaxStages ? fitting : kMaxStages;
  }
  static constexpr int kStages = fitting_stages(kFixedBytes);
  // Threads store a D whose rows start anywhere through both of a warpgroup's store buffers. For TMA one is enough,
  // and makes room for a fourth stage; a fifth or sixth is not worth the stores that wait for each other.
  static constexpr int kStagesForTma =
      kStages < 4 && Config::kClusterK == 1 ? fitting_stages(Config::kConsumers * kStoreBytes) : kStages;
  static constexpr int kTmaStoreBuffers = kStagesForTma > kStages ? 1 : 2;

  static constexpr int kStoreOffset = kStages * kStageBytes;
  static constexpr int kPartialOffset = kStoreOffset + Config::kConsumers * 2 * kStoreBytes;
  static constexpr int kEnd = kStoreOffset + kFixedBytes;
  static constexpr int kEndForTma = kStagesForTma * kStageBytes + Config::kConsumers * kTmaStoreBuffers * kStoreBytes;
  static constexpr int kBarrierOffset = kEnd > kEndForTma ? kEnd : kEndForTma;
  static constexpr int kNumBarriers = 2 * kStagesForTma + 3 * Config::kConsumers;
  static constexpr int kSharedBytes = kBarrierOffset + 8 * kNumBarriers;

  static_assert(Config::kTileM % 64 == 0 && kBlocksM >= 1, "wgmma multiplies 64 rows at a time");
  static_assert(Config::kTileN % 8 == 0 && Config::kTileN <= 256, "the instruction's range of n");
  static_assert(kAccumulators <= kConsumerRegisters - 40, "accumulators must leave registers for the epilogue");
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedMemory, "one stage loading, one multiplying, one waiting");
  static_assert(Config::kClusterSize <= 8, "portable cluster size");
  static_assert(Config::kClusterK == 1 || kShares > 1 || Config::kClusterK >= Config::kConsumers,
                "no block adds up what two warpgroups have");
  static_assert(!kTransB || sizeof(In) == 2, "B comes from shared memory, N-major in 16-bit types only");
};

}  // namespace tcgemm::wgmma_family
