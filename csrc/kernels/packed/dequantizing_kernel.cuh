// D[m,n] = sum over k of X[m,k] * w[k,n] for so many rows of X that tensor cores take the time, for sm_90a: the weight
// is dequantized in registers before it is multiplied. Its elements are (u - zero) * scale, rounded once to the dtype
// of X as weight_kernel.cuh rounds them, so that results are those of a 16-bit product with the dequantized weight.
// Unlike wide_kernel.cuh it keeps no accumulators of a group, which leaves registers for 256 rows, and waits at no
// group's end.
//
// A consumer warpgroup dequantizes the fragments of two instructions, of 32 rows of the weight, while those of the last
// 32 multiply, also across stages: there is always a wgmma under way.
//
// Two CTAs of up to 128 rows fit an SM, of which one converts while the other multiplies, begins or ends. Of 128 rows
// they do so without a producer's warpgroup: a thread of the first consumer warp loads into a stage, one stage after
// the others have released it.
//
// Roles, shared memory and barriers: wide_block.cuh, WideGeometry.
#pragma once

#include <cstdint>

#include "kernels/packed/wide_block.cuh"

namespace tcgemm::packed {

template <typename Config, typename Weight, typename X, typename Epilogue>
class DequantizingBlock : public WideBlock<Config, Weight, X, Epilogue> {
  using Base = WideBlock<Config, Weight, X, Epilogue>;
  using Base::barriers_, Base::begin_, Base::end_, Base::lane_, Base::params_, Base::warp_;
  using Base::has_tile, Base::release, Base::stage_address, Base::table, Base::tile, Base::weight_tile;
  using Base::kBlocks, Base::kConsumerWarps, Base::kCount, Base::kGeometry, Base::kGroups, Base::kChunks, Base::kRowK,
      Base::kStageK, Base::kStages, Base::kTile;
  using typename Base::Scale;
  using Scales = ScalesOf<Weight, X>;
  // Whether a thread of the first consumer warp is the producer.
  static constexpr bool kLoadsItself = kTile.producer_threads() == 0;
  static_assert(kTile.dequantizes && sizeof(X) == 2, "x has 16 bits");
  static_assert(kStageK == kRowK && kBlocks == 2, "a stage is a row of the swizzle, of two blocks of K");

 public:
  __device__ __forceinline__ DequantizingBlock(const WideParams& params, const Epilogue& epilogue, const Work& work,
                                               uint32_t shared)
      : Base(params, epilogue, work, shared) {}

  __device__ __forceinline__ void run() {
    Base::prepare();
    if constexpr (!kLoadsItself) {
      if (warp_ >= kConsumerWarps) return Base::run_producers();
      ptx::setmaxnreg_inc<kGeometry.consumer_registers(), kGeometry.blocks_per_sm()>();
    } else {
      Base::prefetch(threadIdx.x, kTile.threads());
    }
    float accumulators[kCount];
    multiply(accumulators);
    remove_headroom<Scales>(accumulators);  // mutant: headroom_not_removed
    Base::scale_columns(accumulators);
    Base::finish(accumulators);
  }

 private:
  // Scales and zero-point terms of this lane's two columns of a tile, g and g + 8.
  struct Columns {
    Scales scales;
    uint32_t zeros[2];
  };

  __device__ __forceinline__ void multiply(float (&accumulators)[kCount]) {
#pragma unroll
    for (float& accumulator : accumulators) accumulator = 0.0f;
    if (begin_ == end_) return;
#pragma unroll 1
    for (int i = 0; kLoadsItself && i < kStages - 2; ++i) load_next();
    const Columns whole = whole_columns();
    Fragments fragments[kBlocks];
    PipelineState state{kStages};
    wait(state);
    dequantize(stage_address(0), 0, whole, fragments[0]);
    int previous = -1;
#pragma unroll 1
    for (int32_t left = end_ - begin_; left > 1; --left) {
      const int stage = state.stage;
      multiply_stage(accumulators, fragments, stage, previous, whole);
      state.advance();
      wait(state);
      // The second block of the last stage multiplies meanwhile.
      dequantize(stage_address(state.stage), 0, whole, fragments[0]);
      previous = stage;
    }
    multiply_stage(accumulators, fragments, state.stage, previous, whole);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(accumulators);
    release(state.stage);
    if (kLoadsItself && warp_ == 0) {
      if (ptx::elect_one()) Base::end_loads(loads_);
      __syncwarp();
    }
  }

  // Loads the next stage that is left, if this warp has the producer.
  __device__ __forceinline__ void load_next() {
    if (kLoadsItself && warp_ == 0 && begin_ + num_loaded_ < end_) {
      if (ptx::elect_one()) Base::load_stage(begin_ + num_loaded_, loads_);
      __syncwarp();
      ++num_loaded_;
      loads_.advance();
    }
  }

  __device__ __forceinline__ void wait(const PipelineState& state) const {
    ptx::mbarrier_wait(barriers_.full(state.stage), state.phase);  // mutant: stages_not_awaited
  }

  // Of whose first block there are fragments; returns while the second block multiplies, and releases the stage before.
  __device__ __forceinline__ void multiply_stage(float (&accumulators)[kCount], Fragments (&fragments)[kBlocks],
                                                 int stage, int previous, const Columns& whole) {
    const uint32_t address = stage_address(stage);
    const uint64_t x = ptx::swizzle_128b_descriptor(address, 0, 1024);
    issue(accumulators, fragments[0], x);
    // Where the stage before the last one was: all warps have released it since, so that the producer does not wait.
    load_next();
    ptx::wgmma_wait_group<1>();
    if (previous >= 0) release(previous);
    dequantize(address, 1, whole, fragments[1]);
    issue(accumulators, fragments[1], x + (kBlockK * sizeof(X) >> 4));  // mutant: blocks_of_k_exchanged
    ptx::wgmma_wait_group<1>();
  }

  static __device__ __forceinline__ void issue(float (&accumulators)[kCount], const Fragments& fragments, uint64_t x) {
    ptx::wgmma_fence_operand(accumulators);
    ptx::wgmma_fence();  // mutant: registers_not_fenced
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // mutant: steps_exchanged
      ptx::wgmma_m64k32b<X, X>(accumulators, fragments[step], x + step * (32 >> 4), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_fence_operand(accumulators);
  }

  // The fragments of 32 of a stage's K.
  __device__ __forceinline__ void dequantize(uint32_t stage, int block, const Columns& whole,
                                             Fragments& fragments) const {
    const uint32_t values = stage + kGeometry.values_offset() + tile() * (kChunks * kChunkBytes) + lane_ * 16;
    uint32_t words[4];
    if constexpr (kChunks == kBlocks) {
      const uint4 integers = ptx::ld_shared_v4_u32(values + block * kChunkBytes);  // mutant: chunks_exchanged
      memcpy(words, &integers, sizeof(words));
    } else {
      ptx::ld_shared_v2_u32(words[0], words[1], values + block * 8);  // mutant: halves_of_a_chunk_exchanged
    }
    const Columns columns = Weight::kGroup == 0 ? whole : columns_of(stage, block);
    columns.scales.dequantize(words, 0, columns.zeros, table(), fragments);
  }

  // Of the group that has a block of 32 of a stage's K.
  __device__ __forceinline__ Columns columns_of(uint32_t stage, int block) const {
    int group = Weight::kGroup > 0 && Weight::kGroup < kStageK ? block * kBlockK / Weight::kGroup : 0;
    if constexpr (Weight::kGroup == 16) group += lane_ % 4 / 2;  // mutant: first_group_of_a_block
    const int place = tile() * kGroups + group;                  // mutant: group_of_another_block
    Columns found;
    const uint32_t scales = (place * packed::kTile + lane_ / 4 * 2) * static_cast<uint32_t>(sizeof(Scale));
    found.scales = load_fragment_scales<Scales, Scale>(stage + kGeometry.scales_offset() + scales);
    set_zeros(found);
    if constexpr (Weight::kZeroPoints) {
      // mutant: zeros_of_the_next_column
      const uint32_t zeros = stage + kGeometry.zeros_offset() + place * 32 + lane_ / 4 * 4;
      zero_point_terms<Weight, X>(ptx::ld_shared_u32(zeros), found.zeros);
    }
    return found;
  }

  // From memory, where groups are whole columns.
  __device__ __forceinline__ Columns whole_columns() const {
    Columns found;
    set_zeros(found);
    if constexpr (Weight::kGroup == 0) {
      const bool is_there = has_tile(tile());
      // mutant: scales_of_the_next_tile
      const int64_t place = static_cast<int64_t>(weight_tile(tile())) * 8 + lane_ / 4;
      const auto* const scales = reinterpret_cast<const Scale*>(params_.scales) + place * 2;
      const Scale both[2] = {is_there ? scales[0] : Scale{}, is_there ? scales[1] : Scale{}};
      found.scales = Scales(both);
      if constexpr (Weight::kZeroPoints) {
        const auto* const zeros = reinterpret_cast<const uint32_t*>(params_.zero_points);
        zero_point_terms<Weight, X>(is_there ? zeros[place] : 0, found.zeros);
      }
    }
    return found;
  }

  static __device__ __forceinline__ void set_zeros(Columns& columns) {
    columns.zeros[0] = columns.zeros[1] = zero_point_term<X, Weight::kBits>(Weight::kZero);
  }

  int32_t num_loaded_ = 0;
  PipelineState loads_{kStages};
};

template <typename Config, typename Weight, typename X, typename Epilogue>
__global__ void __launch_bounds__(Config::kTile.threads(),
                                  WideBlock<Config, Weight, X, Epilogue>::kGeometry.blocks_per_sm())
    dequantizing_kernel(const __grid_constant__ WideParams params, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  run_wide<Config, DequantizingBlock<Config, Weight, X, Epilogue>>(params, epilogue, shared_memory);
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::packed
