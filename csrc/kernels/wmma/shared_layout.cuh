// What lies in the shared memory of a block of tiled_kernel.cuh, and how much.
#pragma once

#include <cstdint>

namespace tcgemm::wmma {

template <typename T_, int kStrip, int kTileK, bool kAlongK_>
struct OperandTile {
  using T = T_;
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kOuter = kAlongK ? kStrip : kTileK;
  static constexpr int kInner = kAlongK ? kTileK : kStrip;
  static constexpr int kPad = sizeof(T) == 8 ? 4 : sizeof(T) == 4 ? (kAlongK ? 4 : 8) : kVector;
  static constexpr int kLd = kInner + kPad;
  static constexpr int kElements = kOuter * kLd;
  static constexpr int kChunksAcross = kInner / kVector;
  static constexpr int kChunks = kOuter * kChunksAcross;
  static constexpr int kStepAlongK = kTileK;
  static_assert(kInner % kVector == 0 && kLd % kVector == 0, "rows are whole 16-byte chunks");
  static_assert(kElements * sizeof(T) % 32 == 0, "load_matrix_sync wants fragments on 32 bytes");

  // The fragment `strip_idx` into the strip and `k_idx` into the step.
  static __device__ __forceinline__ const T* at(const T* shared, int strip_idx, int k_idx) {
    return shared + (kAlongK ? strip_idx * kLd + k_idx : k_idx * kLd + strip_idx);
  }
};

// Rows of a warp's part of a tile, as many as a fragment has.
template <typename Config, typename Acc>
struct StagedRows {
  // 8 accumulators of padding keep rows on 16 bytes and the lanes of a fragment in different banks.
  static constexpr int kLd = Config::kWarpN + 8;
  static constexpr int kElements = Config::kMmaM * kLd;

  Acc* data;
  // Where the first one lies in the product, of this many rows and columns.
  int64_t batch_idx, m_idx, n_idx;
  int32_t m, n;
};

template <typename Config, typename In, typename Acc>
struct TiledShared {
  using TileA = OperandTile<In, Config::kTileM, Config::kTileK, Config::kAAlongK>;
  using TileB = OperandTile<In, Config::kTileN, Config::kTileK, Config::kBAlongK>;
  static constexpr int kWarpsM = Config::kTileM / Config::kWarpM;
  static constexpr int kWarpsN = Config::kTileN / Config::kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kPipelineBytes = Config::kStages * (TileA::kElements + TileB::kElements) * sizeof(In);
  static constexpr int kStagingBytes = kWarpsM * kWarpsN * StagedRows<Config, Acc>::kElements * sizeof(Acc);
  static constexpr int kBytes = kPipelineBytes > kStagingBytes ? kPipelineBytes : kStagingBytes;
};

}  // namespace tcgemm::wmma
