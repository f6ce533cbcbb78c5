// What a config, an instruction and its operands decide at compile time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/wgmma/config.h"
#include "kernels/wgmma/params.cuh"

namespace tcgemm::wgmma_family {

template <typename Operand>
inline constexpr OperandShape operand_shape{sizeof(typename Operand::Element), Operand::kMajor, Operand::kScaledRows};

// One operand's tile in a stage.
template <typename Operand, int kExtentInUse, int kTileK_>
struct OperandTile : Operand {
  static constexpr OperandShape kShape = operand_shape<Operand>;
  static constexpr int kTileK = kTileK_, kChunk = kShape.chunk();
  static constexpr int kExtent = kShape.padded(kExtentInUse), kBytes = kShape.bytes(kExtentInUse, kTileK);

  static_assert(kTileK * sizeof(typename Operand::Element) == 128, "a row of the swizzle");
};

template <typename ConfigType, typename MmaType, typename OperandsType>
struct Traits {
  using Config = ConfigType;
  using Mma = MmaType;
  using Operands = OperandsType;
  static constexpr Geometry kGeometry{Config::kShape, operand_shape<typename Operands::A>,
                                      operand_shape<typename Operands::B>};
  static constexpr int kTileK = kGeometry.tile_k();
  using A = OperandTile<typename Operands::A, Config::kTileM, kTileK>;
  using B = OperandTile<typename Operands::B, Config::kTileN, kTileK>;
  static constexpr int kMmaK = 32 / sizeof(typename Mma::A), kSteps = kTileK / kMmaK;  // mutant: half_of_a_k_block
  static constexpr int kRowsPerGroup = Config::kShape.rows_per_group();
  static constexpr int kBlocksM = kRowsPerGroup / 64;
  static constexpr bool kRegisterA = A::kSource != tile::Source::kShared;
  static constexpr int kABytes = kGeometry.a_bytes(), kStageBytes = kGeometry.stage_bytes();
  static constexpr int kLoadedBytes = A::kBytes + B::kBytes;
  // Whether accumulators are promoted: those of each k block are added to float32 registers, since the tensor core
  // does not keep accumulators of 8-bit floats in full.
  static constexpr bool kPromotes = Mma::kPromoteEvery != 0;
  // Of one part of a tile, with accumulators of its own until they are promoted: half its rows, or its columns.
  static constexpr int kParts = kPromotes ? Config::kShape.promoted_parts() : 1;
  static constexpr int kPartBlocks = kParts == 2 && kBlocksM == 2 ? 1 : kBlocksM;
  static constexpr int kSecondPart = kPromotes ? Config::kShape.promoted_column() : 0;
  static constexpr int kPartColumns = kSecondPart != 0 ? kSecondPart : Config::kTileN;
  static constexpr int kAccumulators =
      Config::kShape.accumulators_per_thread() + (kPromotes ? kPartBlocks * kPartColumns / 2 : 0);
  // Whether the accumulators of a k block are multiplied by its block scales at promotion.
  static constexpr bool kIsScaled = A::kScaledRows != 0;
  // Of each thread once its role is known, together at most what a block has at launch. The producer
  // needs 40 for multicast; fragments of A need 160 where accumulators are 96.
  static constexpr bool kIsLarge = kAccumulators + (kRegisterA ? 16 * kBlocksM : 0) > 128;
  static constexpr int kProducerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 32 : 40) : (kIsLarge ? 40 : 56);
  static constexpr int kConsumerRegisters = Config::kConsumers == 3 ? (kRegisterA ? 160 : 152) : (kIsLarge ? 232 : 224);
  static constexpr int kStoreBytes = Geometry::kStoreBytes;
  static constexpr int kShares = kGeometry.shares();
  template <int kTileN>
  using WithColumns = wgmma_family::Config<Config::kTileM, kTileN, Config::kClusterM, Config::kClusterN,
                                           Config::kClusterK, Config::kPingPong, Config::kSwapped>;
  using Share = WithColumns<kGeometry.share_tile_n()>;
  static constexpr int kStages = kGeometry.stages(), kStagesForTma = kGeometry.stages_for_tma();
  static constexpr int kTmaStoreBuffers = kGeometry.tma_store_buffers();
  static constexpr int kStoreOffset = kGeometry.store_offset();
  static constexpr int kPartialOffset = kGeometry.partial_offset(), kBarrierOffset = kGeometry.barrier_offset();
  static constexpr int kScaleOffset = kGeometry.scale_offset(), kScaleBytes = kGeometry.scale_bytes();
  static constexpr int kNumBarriers = kGeometry.num_barriers();

  static_assert(Config::kTileM % 64 == 0 && kBlocksM >= 1, "wgmma multiplies 64 rows at a time");
  static_assert(Config::kTileN % 8 == 0 && Config::kTileN <= 256, "the instruction's range of n");
  static_assert(kAccumulators <= kConsumerRegisters - 40, "accumulators must leave registers for the epilogue");
  static_assert(kStages >= 3 && kGeometry.shared_bytes() <= kMaxSharedMemory,
                "one stage loading, one multiplying, one waiting");
  static_assert(Config::kClusterSize <= 8, "portable cluster size");
  static_assert(Config::kClusterK == 1 || kShares > 1 || Config::kClusterK >= Config::kConsumers,
                "no block adds up what two warpgroups have");
  static_assert(B::kSource == tile::Source::kShared, "the instruction takes B from shared memory");
  static_assert((kRegisterA || sizeof(typename A::Element) == sizeof(typename Mma::A)) &&
                    sizeof(typename B::Element) == sizeof(typename Mma::B),
                "it takes the elements there as they are");
  // Of integers accumulators are int32, held in registers of float32 as those bits.
  static constexpr bool kIsInteger = std::is_same_v<typename Mma::Accumulator, int32_t>;
  static_assert(kIsInteger || std::is_same_v<typename Mma::Accumulator, float>, "accumulators have 32 bits");
  static_assert(!kPromotes || (Mma::kPromoteEvery == kTileK && !kRegisterA && kParts > 0),
                "promoted with each k block, from one set of registers to another");
  static_assert(B::kIsKMajor || kSecondPart == 0,
                "descriptors of an N-major B leave too few registers for parts of columns");
  static_assert(kBlocksM <= 2, "a tile's parts are its rows or its columns");
  static_assert(!kIsScaled || (kPromotes && B::kScaledRows != 0),
                "the accumulators of a k block have scales of both operands");
};

}  // namespace tcgemm::wgmma_family
