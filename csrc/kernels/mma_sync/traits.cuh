// What a config, an instruction and its operands decide at compile time.
#pragma once

#include "kernels/mma_sync/config.h"
#include "kernels/mma_sync/instruction.cuh"
#include "kernels/mma_sync/operand_tile.cuh"

namespace tcgemm::mma {

template <typename ConfigType, typename MmaType, typename OperandsType>
struct Traits {
  using Config = ConfigType;
  using Mma = MmaType;
  using Operands = OperandsType;
  using Instruction = WarpMma<Mma>;
  using Partial = typename Instruction::Partial;
  using A = OperandTile<Role::kA, typename Operands::A, typename Mma::A, Config>;
  using B = OperandTile<Role::kB, typename Operands::B, typename Mma::B, Config>;
  static constexpr Geometry kGeometry{Config::kTile, sizeof(typename Mma::A), A::kShape, B::kShape};
  static constexpr int kTileK = kGeometry.tile_k();
  static constexpr bool kIsTensorLayout = kGeometry.is_tensor_layout();
  static constexpr int kSteps = Config::kTileKBytes / 32;
  static constexpr int kStageBytes = kGeometry.stage_bytes(), kStagesBytes = kGeometry.stages_bytes();
  static constexpr int kMmasM = Config::kWarpM / 16;
  static constexpr int kMmasN = Config::kWarpN / 8;
  using Accumulators = typename Instruction::Accumulator[kMmasM][kMmasN];

  // Partial sums of 16 rows of a warp. The padding spreads rows over the banks: a fragment store
  // covers 8 columns of 4 rows, 16 columns of 2 rows or twice 4 columns of 4 rows.
  static constexpr int kStagingPadding = B::kOrder == FragmentOrder::kConsecutive ? 8
                                         : B::kOrder == FragmentOrder::kPairs     ? 16
                                                                                  : 4;
  static constexpr int kStagingPitch = Config::kWarpN + kStagingPadding;
  static constexpr int kStagingBytesPerWarp = 16 * kStagingPitch * 4;

  static_assert(sizeof(typename Mma::A) == sizeof(typename Mma::B), "a k-step is as many bytes of A as of B");
  static_assert(Mma::kPromoteEvery == 0, "accumulators stay in the instruction's registers");
  static_assert(Config::kThreads / 32 * kStagingBytesPerWarp <= kStagesBytes, "partial sums reuse the stages");
  static_assert(kSteps % 2 == 0, "two fragment buffers alternate within a tile");
};

}  // namespace tcgemm::mma
