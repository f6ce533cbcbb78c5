// D[m,n] = sum over k of X[m,k] * w[k,n] for more rows of X than kernel.cuh multiplies at once, for sm_90a: integers
// are multiplied, and each group's accumulators by its scale. From about 50 rows on, the tensor cores are the
// limit, and mma.sync reaches at most two thirds of the rate of wgmma.
//
// While the instructions of 32 rows of the weight multiply, a consumer warpgroup converts the fragments of the next 32.
// Accumulators of a group are kept apart, and are multiplied by its scale in float32.
//
// X of 8-bit floats is multiplied by integers as 8-bit floats, which hold them exactly; the tensor core's
// accumulators are promoted to float32 registers at the end of each group, or of 128 of K. Rows of X have scales of
// their own, which accumulators are multiplied by at the end.
//
// The last warpgroup has the TMA producer thread, and prefetches the epilogue's operands to L2.
//
// Roles, shared memory and barriers: wide_block.cuh, WideGeometry.
#pragma once

#include <cstdint>

#include "kernels/packed/wide_block.cuh"

namespace tcgemm::packed {

template <typename Config, typename Weight, typename X, typename Epilogue>
class RegisterBlock : public WideBlock<Config, Weight, X, Epilogue> {
  using Base = WideBlock<Config, Weight, X, Epilogue>;
  using Base::barriers_, Base::begin_, Base::end_, Base::lane_, Base::params_, Base::warp_;
  using Base::has_tile, Base::release, Base::stage_address, Base::table, Base::tile, Base::weight_tile;
  using Base::kBlocks, Base::kConsumerWarps, Base::kCount, Base::kGeometry, Base::kGroups, Base::kHalfBytes,
      Base::kChunks, Base::kRowK, Base::kStages, Base::kTile;
  using typename Base::Scale;
  static constexpr int kSteps = kBlockK * sizeof(X) / 32;  // instructions for a block of K
  // Whether each group, or stage, has accumulators of its own, how much of K it has, and the factor that undoes the
  // encoding of integers as float8.
  static constexpr bool kHasGroupAcc = Weight::kGroup > 0 || kIsFloat8<X>;
  static constexpr int kGroupK = Weight::kGroup > 0 ? Weight::kGroup : Base::kStageK;
  static constexpr float kUnit = kIsFloat8<X> ? 1 / kE4M3Unit : 1;

 public:
  __device__ __forceinline__ RegisterBlock(const WideParams& params, const Epilogue& epilogue, const Work& work,
                                           uint32_t shared)
      : Base(params, epilogue, work, shared) {}

  __device__ __forceinline__ void run() {
    Base::prepare();
    if (warp_ >= kConsumerWarps) {
      Base::run_producers();
    } else {
      ptx::setmaxnreg_inc<kGeometry.consumer_registers(), kGeometry.blocks_per_sm()>();
      consume();
      Base::scale_columns(acc_);
      Base::finish(acc_);
    }
  }

 private:
  __device__ __forceinline__ void consume() {
    if constexpr (Weight::kGroup == 0 && Weight::kZeroPoints) {
      const auto* zeros = reinterpret_cast<const uint32_t*>(params_.zero_points);
      // mutant: zeros_of_the_next_tile
      const int64_t place = static_cast<int64_t>(weight_tile(tile())) * 8 + lane_ / 4;
      zero_point_terms<Weight, X>(has_tile(tile()) ? zeros[place] : 0, zeros_);
    }
#pragma unroll
    for (float& x : acc_) x = 0.0f;
    PipelineState state{kStages};
#pragma unroll 1
    for (int32_t stage = begin_; stage < end_; ++stage, state.advance()) {
      ptx::mbarrier_wait(barriers_.full(state.stage), state.phase);  // mutant: stages_not_awaited
      multiply_stage(stage_address(state.stage));
      release(state.stage);
    }
    if constexpr (Weight::kGroup == 0) scale_columns();
  }

  // Waits for all instructions. If they were in flight at the loop's next iteration, ptxas would serialize each one
  // whose A registers that iteration overwrites.
  __device__ __forceinline__ void multiply_stage(uint32_t stage) {
    constexpr int kBlocksPerChunk = kBlocks / kChunks;
    const uint64_t x = ptx::swizzle_128b_descriptor(stage, 0, 1024);
    const uint32_t values = stage + kGeometry.values_offset() + tile() * (kChunks * kChunkBytes) + lane_ * 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint4 integers = ptx::ld_shared_v4_u32(values + chunk * kChunkBytes);
      const uint32_t words[4] = {integers.x, integers.y, integers.z, integers.w};
#pragma unroll
      for (int i = 0; i < kBlocksPerChunk; ++i) {
        const int block = chunk * kBlocksPerChunk + i;  // of the stage's four
        const bool begins = kHasGroupAcc && block * kBlockK % kGroupK == 0;
        const bool ends = kHasGroupAcc && (block + 1) * kBlockK % kGroupK == 0;
        if (Weight::kZeroPoints && Weight::kGroup > 0 && begins) {
          // mutant: zeros_of_the_next_column
          const uint32_t zeros = stage + kGeometry.zeros_offset() + group_place(block) * 32 + lane_ / 4 * 4;
          zero_point_terms<Weight, X>(ptx::ld_shared_u32(zeros), zeros_);
        }
        uint32_t fragments[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          convert_step<Weight, X>(words, i * kSteps + step, zeros_, table(), fragments[step]);
        }
        const int first_k = block * kBlockK;
        // mutant: halves_of_k_exchanged, blocks_of_k_exchanged, blocks_of_k_of_8_bits
        const uint64_t x_block =
            x + ((first_k / kRowK * kHalfBytes + first_k % kRowK * static_cast<int>(sizeof(X))) >> 4);
        ptx::wgmma_fence_operand(open_acc());
        ptx::wgmma_fence();  // mutant: registers_not_fenced
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          // mutant: steps_exchanged, group_not_begun
          ptx::wgmma_m64k32b<X, X>(open_acc(), fragments[step], x_block + step * (32 >> 4), !begins || step != 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_fence_operand(open_acc());
        if (ends) {
          end_group(stage, block);
        } else if (block < kBlocks - 1) {
          ptx::wgmma_wait_group<1>();
        } else {
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_fence_operand(open_acc());
        }
      }
    }
  }

  __device__ __forceinline__ float (&open_acc()) [kCount] {
    if constexpr (kHasGroupAcc) {
      return group_acc_;
    } else {
      return acc_;
    }
  }

  // Where a group of this warp's columns lies among those of the stage.
  __device__ __forceinline__ int group_place(int block) const {
    return tile() * kGroups + block * kBlockK / kGroupK;
  }

  __device__ __forceinline__ void end_group(uint32_t stage, int block) {
    float2 scales = make_float2(1, 1);
    if constexpr (Weight::kGroup > 0) {
      // mutant: scale_of_the_next_group
      const uint32_t place = (group_place(block) * 16 + lane_ / 4 * 2) * static_cast<uint32_t>(sizeof(Scale));
      scales = load_float_scales<Scale>(stage + kGeometry.scales_offset() + place);
      scales = make_float2(kUnit * scales.x, kUnit * scales.y);  // mutant: units_forgotten
    }
    ptx::wgmma_wait_group<0>();  // mutant: groups_not_awaited
    ptx::wgmma_fence_operand(group_acc_);
#pragma unroll
    // mutant: scales_of_columns_exchanged
    for (int i = 0; i < kCount; ++i) acc_[i] += (i % 4 < 2 ? scales.x : scales.y) * group_acc_[i];
  }

  __device__ __forceinline__ void scale_columns() {
    if (begin_ == end_ || !has_tile(tile())) return;
    // mutant: scales_of_the_next_tile
    const int64_t place = static_cast<int64_t>(weight_tile(tile())) * 16 + lane_ / 4 * 2;
    const auto* both = reinterpret_cast<const Scale*>(params_.scales) + place;
    const float scales[2] = {kUnit * float_of(both[0]), kUnit * float_of(both[1])};
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc_[i] *= scales[i % 4 / 2];
  }

  // A thread's accumulators for its warp's 16 columns of the weight: four for each 8 rows of X.
  float acc_[kCount];
  float group_acc_[kCount];  // of a group, or of a stage
  // Zero-point terms of columns g and g + 8.
  uint32_t zeros_[2] = {zero_point_term<X, Weight::kBits>(Weight::kZero),
                        zero_point_term<X, Weight::kBits>(Weight::kZero)};
};

template <typename Config, typename Weight, typename X, typename Epilogue>
__global__ void __launch_bounds__(Config::kTile.threads(),
                                  WideBlock<Config, Weight, X, Epilogue>::kGeometry.blocks_per_sm())
    wide_kernel(const __grid_constant__ WideParams params, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  run_wide<Config, RegisterBlock<Config, Weight, X, Epilogue>>(params, epilogue, shared_memory);
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::packed
