// What a config decides at compile time for grouped products, besides what it decides for all.
#pragma once

#include <cstdint>

#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/ragged_params.cuh"
#include "kernels/wgmma/scheduler.cuh"
#include "kernels/wgmma/traits.cuh"
#include "tile/work_ring.cuh"

namespace tcgemm::wgmma_family {

// The form is the orientation of the config.
// rows (swapped): A of the instruction is the weights and B the tokens, whose number is the flexible extent of
// the instruction: a block's tile is as wide as its tokens need, in steps of 8, of integers of 16. Blocks beside each
// other (kClusterN) have an equal part of a cluster's each, and share the weights: these may be both matrices of a
// gated product, and tokens be gathered where weights have rows of N.
// contraction (not swapped): both operands are stored with rows of M and of N, one for each token, or, tokens last,
// with rows of K.
template <typename Config, typename Mma, typename Operands, typename Epilogue>
struct RaggedTraits : Traits<Config, Mma, Operands> {
  using Base = Traits<Config, Mma, Operands>;
  static constexpr bool kIsRows = Config::kSwapped;
  static constexpr bool kTokensLast = !kIsRows && Base::B::kIsKMajor;
  static constexpr int kWidthStep = Base::kIsInteger ? 16 : 8;
  static constexpr bool kSharesWeights = Config::kClusterN > 1;
  // Whether warps 2 and 3 may gather the tokens.
  static constexpr bool kMayGather = kSharesWeights && !Base::A::kIsKMajor;
  static constexpr int kGatherThreads = kMayGather ? 64 : 0;
  // The producer, those that gather or load scales and both consumers read what tile comes next.
  static constexpr int kLoaders = kGatherThreads + (Base::kIsScaled ? kScaleThreads : 0);
  using Ring = WorkRing<1 + kLoaders + 128 * Config::kConsumers>;
  static constexpr int kRingOffset = ring_offset(Base::kGeometry);

  // Threads that gather keep indices. A block may hand out no more than the 168 registers of each thread that
  // it starts with: it would wait for ever.
  static constexpr int kProducerRegisters = kMayGather ? 56 : 40;
  static constexpr int kConsumerRegisters = kMayGather ? 224 : 232;
  static_assert(kProducerRegisters + Config::kConsumers * kConsumerRegisters <= 168 * Config::kThreads / 128,
                "registers of a block");

  static_assert(Ring::kBytes == kRingBytes, "the launcher's idea of it");
  static_assert(kRingOffset + kRingBytes <= kMaxSharedMemory, "the ring of tiles must fit beside the stages");
  static_assert(Config::kClusterK == 1 && Config::kClusterN <= 2 && !Config::kPingPong,
                "blocks of a cluster share the tokens or the weights");
  static_assert(!kSharesWeights || Config::kClusterM == 1, "tokens that are gathered are not shared");
  static_assert(!kIsRows || Config::kTileN / Config::kClusterM <= kBoxStep * kNumBoxes, "one box of tokens a k block");
  static_assert(kIsRows ? Base::B::kIsKMajor : Base::A::kIsKMajor == Base::B::kIsKMajor,
                "tokens lie in rows of K, a contraction's operands both so or both in rows of M and of N");
  static_assert(!Base::kRegisterA, "the instruction takes A from shared memory");
  static_assert(!kSharesWeights || (kIsRows && (kMayGather || Epilogue::kIsGated)),
                "weights that are shared have rows of N, or are both matrices of a gated product");
  static_assert(kIsRows || kTokensLast || !Base::kPromotes, "k blocks begin at any token");
  static_assert(!(Base::kIsScaled && kMayGather), "warps 2 and 3 load tokens or scales");
  static_assert(kIsRows || !Epilogue::kIsFunction, "a contraction has no epilogue");
  static_assert(kSharesWeights || !Epilogue::kIsGated, "of both matrices a tile has 64 columns in turns");
};

// Counts the tiles of a segment of rows and finds out where they lie.
template <typename Config>
struct RowTiles {
  int32_t columns;       // of clusters, along the weights
  int32_t tile_columns;  // of D, in a tile of a block

  __device__ __forceinline__ static int32_t ceil_div(int32_t x, int32_t y) { return (x + y - 1) / y; }
  __device__ __forceinline__ int32_t num_tiles(bool, int32_t tokens) const {
    return ceil_div(tokens, kMaxTokens) * columns;
  }

  // In: the segment's tokens; out: those of this block's part of the tile, of which there may be none.
  __device__ __forceinline__ void locate(int32_t in_segment, int32_t rank_m, int32_t rank_n, RaggedWork* work) const {
    const int32_t rows = ceil_div(work->num_tokens(), kMaxTokens);
    // Blocks of a segment have as many tokens each, so that none is left with a few only.
    const int32_t width = ceil_div(ceil_div(work->num_tokens(), rows * Config::kClusterN), 8) * 8;
    const SerpentineTile place = SerpentineTile::make(in_segment, rows, columns);
    work->m_idx = (place.column * Config::kClusterM + rank_m) * tile_columns;
    const int32_t begin = work->tokens.token_begin + (place.row * Config::kClusterN + rank_n) * width;
    work->n_idx = work->tokens.token_begin = min(begin, work->tokens.token_end);
    work->tokens.token_end = min(work->n_idx + width, work->tokens.token_end);
  }

 private:
  static constexpr int32_t kMaxTokens = Config::kTileN * Config::kClusterN;
};

// The same for a contraction: each group has the tiles of one D.
template <typename Config>
struct ContractionTiles {
  int32_t rows, columns;  // of clusters

  __device__ __forceinline__ int32_t num_tiles(bool is_group, int32_t) const { return is_group ? rows * columns : 0; }

  __device__ __forceinline__ void locate(int32_t in_segment, int32_t rank_m, int32_t, RaggedWork* work) const {
    const SerpentineTile place = SerpentineTile::make(in_segment, rows, columns);
    work->m_idx = (place.row * Config::kClusterM + rank_m) * Config::kTileM;
    work->n_idx = place.column * Config::kTileN;
  }
};

}  // namespace tcgemm::wgmma_family
