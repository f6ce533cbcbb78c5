// Matrices that a function reads, by TMA: after a tile's k blocks the producer brings them through the same ring of
// stages, so that they are there when the accumulators are, and nothing waits for the next tile's operands.
//
// In steps of 64 rows and 64 columns of each: boxes of 64 rows of 128 bytes. A stage has as many steps as fit, each for
// all consumers that share the tile.
#pragma once

#include <cstdint>

#include "epilogue/function.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/scheduler.cuh"
#include "kernels/wgmma/store.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace tcgemm::wgmma_family {

// Whether a function of so many accumulators of a thread has code for each: where that stays in the instruction cache.
template <typename F>
constexpr bool is_at_once(int accumulators) {
#ifdef TCGEMM_FUNCTIONS_IN_TURNS  // where ptxas would not keep the accumulators in registers beside copies of the code
  return false;
#else
  return accumulators * F::kWork <= 8192;
#endif
}

// How the boxes of a tile lie in stages.
template <typename T, typename F>
struct BoxPlan {
  using Config = typename T::Config;
  static constexpr int kBoxBytes = 64 * 128;
  static constexpr int kConsumers = Config::kConsumers;

  // Of a read's boxes in a step, those of the reads before it come first.
  static constexpr int bytes_before(int read) {
    int sum = 0;
    for (int i = 0; i < read; ++i) sum += F::boxed_bytes(i) / 2 * kBoxBytes;
    return sum;
  }
  static constexpr int kStepBytes = bytes_before(F::kMostReads);
  static constexpr int kStepsOfStage = kStepBytes == 0 ? 0 : T::kStageBytes / (kConsumers * kStepBytes);
  static constexpr int kColumns = Config::kTileN / (F::kIsGated ? 2 : 1);
  // Whether there are any. Swapped tiles would read columns of them, and ping-pong's other consumer would wait for the
  // stages that they are in.
  static constexpr bool kHasAny = kStepsOfStage > 0 && !Config::kSwapped && !Config::kPingPong &&
                                  Config::kClusterK == 1 && is_at_once<F>(T::kBlocksM * kColumns / 2);
  static constexpr int kStepsOfBlock = (kColumns + 63) / 64, kSteps = T::kBlocksM * kStepsOfBlock;
  static constexpr int kStages = kHasAny ? (kSteps + kStepsOfStage - 1) / kStepsOfStage : 0;
};

template <typename T, typename Epilogue, bool = Epilogue::kIsFunction>
struct BoxesOf {
  static constexpr bool kHasAny = false;
};
template <typename T, typename Epilogue>
struct BoxesOf<T, Epilogue, true> : BoxPlan<T, typename Epilogue::Code> {
  // Of the ring, for a tile.
  static __device__ __forceinline__ int stages(const Params<Epilogue>& params) {
    return params.epilogue.values.in_boxes ? BoxesOf::kStages : 0;
  }
};

// The producer's part: loads stage number `number` of those of a tile.
template <typename T, typename Epilogue>
__device__ __forceinline__ void load_boxes(const Params<Epilogue>& params, const Work& work, uint32_t shared,
                                           uint32_t barrier, int number) {
  using Code = typename Epilogue::Code;
  using Plan = BoxPlan<T, Code>;
  const epilogue::FunctionParams& values = params.epilogue.values;
  const epilogue::MatrixIndex batch(values, work.batch_idx);
  const int first = number * Plan::kStepsOfStage, end = min(first + Plan::kStepsOfStage, Plan::kSteps);
  ptx::mbarrier_arrive_expect_tx(barrier, (end - first) * Plan::kConsumers * Plan::kStepBytes);
  uint32_t box = shared;
#pragma unroll 1
  for (int step = first; step < end; ++step) {
    const int32_t column = work.n_idx + step % Plan::kStepsOfBlock * 64;  // mutant: another_columns_box
#pragma unroll 1
    for (int consumer = 0; consumer < Plan::kConsumers; ++consumer) {
      // mutant: another_warpgroups_box
      const int32_t row = work.m_idx + (consumer * T::kBlocksM + step / Plan::kStepsOfBlock) * 64;
#pragma unroll
      for (int i = 0; i < Code::kMostReads; ++i) {
        if (Code::boxed(i) < 0) continue;
        const epilogue::FunctionParams::Read& read = values.reads[i];
        const int32_t inner = read.batch_inner != 0 ? batch.inner : 0, outer = read.batch_outer != 0 ? batch.outer : 0;
#pragma unroll
        for (int part = 0; part < Code::boxed_bytes(i) / 2; ++part, box += Plan::kBoxBytes) {
          ptx::tma_load_4d(box, &params.epilogue.boxes[Code::boxed(i)], barrier, column + part * 32, row, inner, outer);
        }
      }
    }
  }
}

// A consumer's part of what is in a stage, from a column of a step on. kHas<i>: of a read.
template <typename T, typename F>
struct BoxedPart {
  using Plan = BoxPlan<T, F>;
  static constexpr bool kHasAny = Plan::kHasAny;
  template <int i>
  static constexpr bool kHas = kHasAny && F::boxed(i) >= 0;
  static constexpr int kStepsOfBlock = Plan::kStepsOfBlock;

  uint32_t step;    // where the consumer's is
  int column, row;  // in it, of the thread's first element

  template <int i, typename Element>
  __device__ __forceinline__ uint64_t pair(int columns, int half) const {
    constexpr int kBytes = sizeof(Element), kOfBox = 128 / kBytes;
    const int place = column + columns;
    const uint32_t box = step + Plan::bytes_before(i) + place / kOfBox * Plan::kBoxBytes;
    // mutant: another_halfs_matrix
    const uint32_t address = box + swizzle<128>((row + 8 * half) * 128 + place % kOfBox * kBytes);
    if constexpr (kBytes == 2) {
      return ptx::ld_shared_u32(address);
    } else {
      uint32_t first, second;
      ptx::ld_shared_v2_u32(first, second, address);
      return first | uint64_t{second} << 32;
    }
  }
};

// A consumer warpgroup's way through the stages of a tile.
template <typename T, typename F, typename Release>
class BoxReader {
 public:
  using Plan = BoxPlan<T, F>;

  __device__ __forceinline__ BoxReader(const Pipeline<T>& pipeline, uint32_t shared, int consumer, uint32_t barrier_id,
                                       PipelineState& state, const Release& release)
      : pipeline_(pipeline),
        stages_(shared),
        consumer_(consumer),
        barrier_id_(barrier_id),
        state_(state),
        release_(release) {}

  // Where the consumer's part of a step is, once that is there; steps in their order.
  template <int kStep>
  __device__ __forceinline__ uint32_t begin() {
    if constexpr (kStep % Plan::kStepsOfStage == 0) ptx::mbarrier_wait(pipeline_.full(state_.stage), state_.phase);
    // mutant: a_step_too_late
    return stages_ + state_.stage * T::kStageBytes +
           (kStep % Plan::kStepsOfStage * Plan::kConsumers + consumer_) * Plan::kStepBytes;
  }
  // Once all threads have read all of a step.
  template <int kStep>
  __device__ __forceinline__ void end() {
    if constexpr ((kStep + 1) % Plan::kStepsOfStage == 0 || kStep + 1 == Plan::kSteps) give_back();
  }
  // In place of all steps.
  __device__ __forceinline__ void skip() {
#pragma unroll 1
    for (int i = 0; i < Plan::kStages; ++i) {
      ptx::mbarrier_wait(pipeline_.full(state_.stage), state_.phase);
      give_back();
    }
  }

 private:
  __device__ __forceinline__ void give_back() {
    // What has been read, before what TMA writes in its place.
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier_id_, 128);
    release_(state_.stage);  // mutant: a_stage_not_given_back
    state_.advance();        // mutant: the_next_stage_not_taken
  }

  const Pipeline<T>& pipeline_;
  const uint32_t stages_;
  const int consumer_;
  const uint32_t barrier_id_;
  PipelineState& state_;
  const Release& release_;
};

}  // namespace tcgemm::wgmma_family
