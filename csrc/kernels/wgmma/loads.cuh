// From device memory to the stages: TMA loads of operand tiles.
#pragma once

#include <cstdint>

#include "kernels/wgmma/config.h"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/scheduler.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace tcgemm::wgmma_family {

// Loads one box, for all CTAs that `mask` names where kMulticast > 1. kMulticast: CTAs of a cluster that receive one
// TMA load.
template <int kMulticast>
__device__ __forceinline__ void load_box(uint32_t destination, const CUtensorMap* map, uint32_t barrier, uint16_t mask,
                                         int32_t c0, int32_t c1, int32_t inner, int32_t outer) {
  if constexpr (kMulticast > 1) {
    ptx::tma_load_4d_multicast(destination, map, barrier, mask, c0, c1, inner, outer);
  } else {
    ptx::tma_load_4d(destination, map, barrier, c0, c1, inner, outer);
  }
}

// Loads one k block of an operand's tile: kExtent rows of K when it is K-major, else chunks of 128
// bytes along M or N, a row for each k. The kMulticast CTAs that multiply by the same tile each load
// an equal part of it for all of them, this CTA the part number `part`.
template <typename Tile, int kMulticast>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap* map, uint32_t barrier, uint16_t mask,
                                          int part, int32_t first_idx, int32_t k_idx, int32_t inner, int32_t outer) {
  const auto load = [&](uint32_t destination, int32_t c0, int32_t c1) {
    load_box<kMulticast>(destination, map, barrier, mask, c0, c1, inner, outer);
  };
  if constexpr (Tile::kIsKMajor) {
    constexpr int kRows = Tile::kExtent / kMulticast;
    // Each CTA may load some of the eight rows of a swizzle group: TMA swizzles by the address in shared memory.
    static_assert(Tile::kExtent % kMulticast == 0, "each CTA loads as many rows");
    load(tile + part * kRows * 128, k_idx, first_idx + part * kRows);
  } else {
    constexpr int kRows = Tile::kTileK / kMulticast;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kExtent / Tile::kChunk; ++chunk) {
      load(tile + chunk * Tile::kTileK * 128 + part * kRows * 128, first_idx + chunk * Tile::kChunk,
           k_idx + part * kRows);
    }
  }
}

// The same for B of a gated product: its tile's right half is of the second matrix.
template <typename T>
__device__ __forceinline__ void load_gated_tile(uint32_t tile, const CUtensorMap* map, const CUtensorMap* up_map,
                                                uint32_t barrier, uint16_t mask, int part, int32_t first_idx,
                                                int32_t k_idx, int32_t inner, int32_t outer) {
  constexpr int kMulticast = T::Config::kClusterM;
  using Half = OperandTile<typename T::Operands::B, T::Config::kTileN / 2, T::kTileK>;
  if constexpr (Half::kIsKMajor) {
    // Each of the two CTAs that receive the tile loads the rows of one matrix.
    static_assert(kMulticast == 2, "a part of the tile is of one matrix");
    ptx::tma_load_4d_multicast(tile + part * Half::kBytes, part == 0 ? map : up_map, barrier, mask, k_idx, first_idx,
                               inner, outer);
  } else {
    load_tile<Half, kMulticast>(tile, map, barrier, mask, part, first_idx, k_idx, inner, outer);
    load_tile<Half, kMulticast>(tile + Half::kBytes, up_map, barrier, mask, part, first_idx, k_idx, inner, outer);
  }
}

// The producer's way through the k blocks of its tiles. What a tile decides is worked out once: between two k
// blocks of a narrow tile there are 128 clocks.
template <typename T, typename Epilogue>
class Loader {
 public:
  using Config = typename T::Config;

  __device__ __forceinline__ Loader(const Params<Epilogue>& params, uint32_t shared, const Pipeline<T>& pipeline,
                                    uint32_t cta_rank)
      : params_(params),
        shared_(shared),
        pipeline_(pipeline),
        rank_m_(cta_rank % Config::kClusterM),
        rank_n_(cta_rank / Config::kClusterM % Config::kClusterN) {
    // A is multicast along a row of the cluster, B along a column.
    constexpr uint32_t kColumnMask = (1u << Config::kClusterM) - 1;
    uint32_t row_mask = 0;
    for (int i = 0; i < Config::kClusterN; ++i) row_mask |= 1u << (i * Config::kClusterM + rank_m_);
    a_mask_ = static_cast<uint16_t>(row_mask);
    b_mask_ = static_cast<uint16_t>(kColumnMask << rank_n_ * Config::kClusterM);
  }

  // Goes to the first k block of a tile.
  __device__ __forceinline__ void begin(const Work& work) {
    const int32_t outer = params_.grid.batch_inner.divide(work.batch_idx);
    const int32_t inner = work.batch_idx - outer * params_.batch_inner;
    a_inner_ = inner * params_.a_inner, a_outer_ = outer * params_.a_outer;
    b_inner_ = inner * params_.b_inner, b_outer_ = outer * params_.b_outer;
    m_idx_ = work.m_idx, n_idx_ = work.n_idx, k_idx_ = work.first_k_block * T::kTileK;
  }

  // Announces and loads the next k block into a stage that is free.
  __device__ __forceinline__ void load(int stage) {
    const uint32_t barrier = pipeline_.full(stage);
    ptx::mbarrier_arrive_expect_tx(barrier, T::kLoadedBytes);  // mutant: too_few_bytes
    const uint32_t a = shared_ + stage * T::kStageBytes;
    load_tile<typename T::A, Config::kClusterN>(a, &params_.a_map, barrier, a_mask_, rank_n_, m_idx_, k_idx_, a_inner_,
                                                a_outer_);
    load_b(a + T::kABytes, barrier);
    k_idx_ += T::kTileK;  // mutant: another_step
  }

 private:
  __device__ __forceinline__ void load_b(uint32_t b, uint32_t barrier) const {
    if constexpr (Epilogue::kIsGated) {
      load_gated_tile<T>(b, &params_.b_map, &params_.epilogue.b_up_map, barrier, b_mask_, rank_m_, n_idx_, k_idx_,
                         b_inner_, b_outer_);
    } else {
      load_tile<typename T::B, Config::kClusterM>(b, &params_.b_map, barrier, b_mask_, rank_m_, n_idx_, k_idx_,
                                                  b_inner_, b_outer_);
    }
  }

  const Params<Epilogue>& params_;
  const uint32_t shared_;
  const Pipeline<T> pipeline_;
  const int rank_m_, rank_n_;
  uint16_t a_mask_, b_mask_;
  int32_t m_idx_, n_idx_, k_idx_;
  int32_t a_inner_, a_outer_, b_inner_, b_outer_;
};

}  // namespace tcgemm::wgmma_family
