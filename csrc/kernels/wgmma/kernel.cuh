// D[b] = epilogue(A[b] * B[b]) on Hopper: TMA loads, wgmma, one persistent grid.
//
// Operands (tile/operands.cuh): each K-major or not. The instruction takes 16-bit types from shared memory
// either way; of TF32 it takes a B that is K-major only, and an A that is not from registers, to which it
// is loaded from shared memory first; of 8-bit floats both K-major. TMA needs bases and
// strides that are multiples of 16 bytes (the launcher copies an operand that is not) and fills
// what lies outside a matrix with zeros, so no extent has to be a multiple of anything.
//
// Roles (384 threads, 512 for tiles of 192 rows):
//   warpgroup 0     producer: one thread walks this block's tiles and keeps loads of all stages in flight;
//                   two other warps initialise the barriers and ask for the tensor maps; then one of these and
//                   the last one load block scales where operands have them
//   warpgroups 1.. consumers: wgmma from shared memory, epilogue in registers, staged store
// Cooperative: the consumers split a tile's rows. Ping-pong: they take alternate tiles, and an
// order barrier lets one multiply while the other one stores. Accumulators of 8-bit floats leave the tensor
// core with each k block, unless Mma::kPromoteEvery is 0, and are multiplied by its scales.
//
// Pipelines (arrivals that complete a phase):
//   full[stage]    1 (the producer's expect_tx) + the bytes of both operand tiles, or of a function's matrices; one
//                  more for each thread that loads scales
//   empty[stage]   one for each consumer warpgroup that reads the stage, or each of its warps where it reads scales,
//                  from each block of the cluster that loads into it or receives its multicast
//   order[group]   4: each warp of the other consumer has issued its last multiplication
//   two more for each group where a cluster splits K: see cluster_sum.cuh
//
// Shared memory, from a 1024-byte boundary: stages of (A tile, B tile); two store buffers of
// 8 KB for each consumer warpgroup, or one (Traits::kStagesForTma); other blocks' products
// (kClusterK > 1); block scales of all stages; barriers.
#pragma once

#include <cstdint>

#include "kernels/wgmma/cluster_sum.cuh"
#include "kernels/wgmma/function_store.cuh"
#include "kernels/wgmma/loads.cuh"
#include "kernels/wgmma/multiply.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/scales.cuh"
#include "kernels/wgmma/scheduler.cuh"
#include "kernels/wgmma/store.cuh"
#include "kernels/wgmma/traits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

namespace tcgemm::wgmma_family {

// The producer thread, whose first load is under way: loads the operands of the CTA's tiles, and the matrices of their
// functions.
template <typename T, typename Epilogue, typename Walk>
__device__ __forceinline__ void load_tiles(const Params<Epilogue>& params, uint32_t shared, const Pipeline<T>& pipeline,
                                           Walk& walk, Loader<T, Epilogue>& loader, int stages) {
  using Boxes = BoxesOf<T, Epilogue>;
  PipelineState state{stages};
  state.advance();
  int32_t left = params.k_blocks - 1;  // the first k block is under way
  for (;;) {
#pragma unroll 1  // the first way through it is the slowest: its instructions come from afar
    for (; left > 0; --left, state.advance()) {
      ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);  // mutant: stages_overwritten
      loader.load(state.stage);
    }
    if constexpr (Boxes::kHasAny) {
#pragma unroll 1
      for (int i = 0; i < Boxes::stages(params); ++i, state.advance()) {
        ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
        load_boxes<T>(params, walk.work(), shared + state.stage * T::kStageBytes, pipeline.full(state.stage), i);
      }
    }
    if (!walk.next(params)) break;
    loader.begin(walk.work());
    left = params.k_blocks;
  }
  // Not earlier: blocks of the next kernel would wait on SMs that have no tile of ours.
  ptx::griddepcontrol_launch_dependents();
  pipeline.drain(state);  // mutant: block_left_early
}

// Adds up the product of a tile in `acc`; the last stage that it has read is released by then.
template <typename T, typename Release>
__device__ __forceinline__ void multiply_tile(float (&acc)[T::kBlocksM][T::Config::kTileN / 2], int32_t k_blocks,
                                              uint32_t shared, uint32_t first_row_bytes, const Pipeline<T>& pipeline,
                                              PipelineState& state, const Fragments<typename T::A>& fragments,
                                              Scales<T>& scales, const Release& release, int consumer, int thread_idx) {
  [[maybe_unused]] int previous_stage = -1;
  if constexpr (T::kPromotes) {
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
      for (float& x : acc[block]) x = 0;  // mutant: accumulators_of_the_tile_before
    }
  }
#pragma unroll 1
  for (int32_t i = 0; i < k_blocks; ++i) {
    ptx::mbarrier_wait(pipeline.full(state.stage), state.phase);  // mutant: stages_not_awaited
    const uint32_t stage = shared + state.stage * T::kStageBytes;
    const uint32_t a = stage + first_row_bytes, b = stage + T::kABytes;
    const auto release_previous = [&] {
      if (previous_stage >= 0) release(previous_stage);
    };
    if constexpr (T::kPromotes) {
      scales.go_to(state.stage);
      multiply_and_promote<T>(acc, a, b, scales, [&] { release(state.stage); });
    } else if constexpr (T::kRegisterA) {
      multiply_from_registers<T>(acc, a, b, fragments, i != 0, release_previous);
    } else {
      multiply_from_shared<T>(acc, a, b, i != 0, release_previous);
    }
    if constexpr (!T::kPromotes) previous_stage = state.stage;
    state.advance();
  }
  if constexpr (T::Config::kPingPong) pipeline.pass_turn(consumer, thread_idx);
  if constexpr (!T::kPromotes) {
    ptx::wgmma_wait_group<0>();  // mutant: accumulators_not_awaited
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(acc[block]);
    release(previous_stage);
  }
}

// The consumer warpgroups: multiply and store the CTA's tiles.
template <typename T, typename Epilogue, typename Walk>
__device__ __forceinline__ void compute_tiles(const Params<Epilogue>& params, uint32_t shared,
                                              const Pipeline<T>& pipeline, Walk& walk, int stages, int consumer,
                                              uint32_t cta_rank) {
  using Config = typename T::Config;
  const int thread_idx = threadIdx.x % 128;
  const int store_bytes = (stages > T::kStages ? T::kTmaStoreBuffers : 2) * T::kStoreBytes;
  const uint32_t store_buffers = shared + stages * T::kStageBytes + consumer * store_bytes;
  int buffer_idx = 0;
  const uint32_t barrier_id = 1 + consumer;

  // Thread i, of each warp where those release, tells the producer of the i-th CTA that multicasts to this one or
  // from which it receives that a stage is free.
  const int rank_m = cta_rank % Config::kClusterM, rank_n = cta_rank / Config::kClusterM % Config::kClusterN;
  int32_t peer = -1;
  const int releasing_idx = T::kIsScaled ? thread_idx % 32 : thread_idx;
  if (releasing_idx < Config::kClusterM) {
    peer = rank_n * Config::kClusterM + releasing_idx;
  } else if (releasing_idx < Config::kMulticast && releasing_idx - Config::kClusterM < Config::kClusterN - 1) {
    const int other_n = releasing_idx - Config::kClusterM;
    peer = (other_n < rank_n ? other_n : other_n + 1) * Config::kClusterM + rank_m;
  }
  const auto release = [&](int stage) {
    if constexpr (T::kIsScaled) __syncwarp();
    if constexpr (Config::kMulticast == 1) {
      if (releasing_idx == 0) ptx::mbarrier_arrive(pipeline.empty(stage));
    } else {
      if (peer >= 0) ptx::mbarrier_arrive_remote(pipeline.empty(stage), peer);
    }
  };

  const int32_t first_row = Config::kPingPong ? 0 : consumer * T::kRowsPerGroup;
  const Fragments<typename T::A> fragments(thread_idx);
  Scales<T> scales(shared, first_row, thread_idx);
  PipelineState state{stages};
  uint32_t turn = 0;
  [[maybe_unused]] ClusterSum<T> cluster_sum(shared, cta_rank, consumer);

#pragma unroll 1
  for (bool has_tile = true; has_tile; has_tile = walk.next(params)) {
    const Work work = walk.work();
    if (Config::kPingPong && (walk.number() & 1) != consumer) {
      state.advance(params.k_blocks);
      continue;
    }
    if constexpr (Epilogue::kIsFunction) {
      prefetch_function<typename Epilogue::Code, Config, T::kRowsPerGroup>(
          params.epilogue.values, work.m_idx + first_row, work.n_idx, work.batch_idx);
    }
    // Column of the share of the tile that this CTA will store.
    const int32_t first_column = Config::kClusterK > 1 ? cluster_sum.first_column() : 0;
    [[maybe_unused]] WarpgroupEpilogue<T, Epilogue> function(params.epilogue, work.m_idx + first_row,
                                                             work.n_idx + first_column, work.batch_idx);
    if constexpr (Config::kPingPong) {
      // Group 0 begins; from then on each one waits for the other's previous tile.
      if (walk.number() > 0) {
        ptx::mbarrier_wait(pipeline.order(consumer), turn);  // mutant: wrong_parity
        turn ^= 1;
      }
    }

    // Declared here: what it held for the last tile must not stay live across the scheduler.
    float acc[T::kBlocksM][Config::kTileN / 2];
    multiply_tile<T>(acc, params.k_blocks, shared, first_row * 128, pipeline, state, fragments, scales, release,
                     consumer, thread_idx);

    const int32_t m_idx = work.m_idx + first_row;
    const auto store_values = [&](auto tile, auto& values, int32_t n_idx) {
      const int32_t d_batch_idx = work.split_idx * params.batch + work.batch_idx;
      store_tile<decltype(tile), T::kTmaStoreBuffers>(values, params, params.d_map, store_buffers, buffer_idx, m_idx,
                                                      n_idx, d_batch_idx, barrier_id);
      if constexpr (Epilogue::kIsSymmetric) {
        // Squares on the diagonal are computed whole.
        if (!work.is_below) return;
        store_tile<typename decltype(tile)::Mirrored, T::kTmaStoreBuffers>(values, params, params.epilogue.mirror_map,
                                                                           store_buffers, buffer_idx, m_idx, n_idx,
                                                                           d_batch_idx, barrier_id);
      }
    };
    const auto store = [&](auto tile, auto& values, int32_t n_idx) {
      if constexpr (Epilogue::kIsFunction) {
        BoxReader<T, typename Epilogue::Code, decltype(release)> boxes(pipeline, shared, consumer, barrier_id, state,
                                                                       release);
        function.apply(values, boxes);
        if constexpr (!Epilogue::Code::kStoresRows) return;
      }
      if constexpr (Epilogue::kIsGated) {
        static_assert(Config::kRunsGated, "columns of both matrices are in the same thread");
        float left[T::kBlocksM][Config::kTileN / 4];
        take_left(left, values);
        store_values(typename T::template WithColumns<Config::kTileN / 2>{}, left, n_idx);
      } else {
        store_values(tile, values, n_idx);
      }
    };
    if constexpr (Config::kClusterK > 1) {
      float share[T::kBlocksM][T::Share::kTileN / 2];
      if (cluster_sum.add_up(acc, share, thread_idx, barrier_id)) {
        store(typename T::Share{}, share, work.n_idx + first_column);
      }
    } else {
      store(Config{}, acc, work.n_idx);
    }
  }
  if constexpr (Config::kClusterK > 1) cluster_sum.drain();  // mutant: shares_left_under_way
  // The stores read our shared memory; that they are complete is for whoever waits for the kernel.
  if (thread_idx == 0) ptx::tma_store_wait_read<0>();
}

template <typename Config, typename Mma, typename Operands, typename Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params<Epilogue> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = Traits<Config, Mma, Operands>;
  using Boxes = BoxesOf<T, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_base_address(shared_memory);
  const Pipeline<T> pipeline(shared);

  // Shuffled so that the compiler knows it is the same in a whole warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  const uint32_t cta_rank = cluster_rank<Config>();
  const int stages = num_stages<T>(params);

  // A block begins with nothing in the instruction cache, which costs five clocks for each instruction. So the
  // producer's way to its first load is short and straight: other warps do what can be done beside it. Branches by
  // warp and by thread are apart, so that the compiler knows that warps are whole after them, and where a tile lies
  // is worked out in uniform registers.
  if (warp == kInitializingWarp) {
    if (ptx::elect_one()) {
      pipeline.init(T::kIsScaled ? 1 + kScaleThreads : 1);  // mutant: nobody_waits_for_them
      if constexpr (Config::kClusterK > 1) ClusterSum<T>::init(shared);
      ptx::fence_mbarrier_init();
    }
  } else if (warp == 2) {
    if (ptx::elect_one()) {
      ptx::prefetch_tensormap(&params.a_map);
      ptx::prefetch_tensormap(&params.b_map);
      ptx::prefetch_tensormap(&params.d_map);
    }
  }
  BlockStart<T>::arrive(warp);
  TileWalk<Config, Epilogue> walk(params);
  BlockStart<T>::wait(warp);
  Loader<T, Epilogue> loader(params, shared, pipeline, cta_rank);
  loader.begin(walk.work());
  if (warp == 0 && ptx::elect_one()) loader.load(0);

  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) {
      load_tiles<T>(params, shared, pipeline, walk, loader, stages);
    } else if constexpr (T::kIsScaled) {
      if (warp >= kFirstScaleWarp) {
        ScaleLoader<T, Epilogue> scales(params, shared, pipeline, threadIdx.x - 32 * kFirstScaleWarp);
        PipelineState state{stages};
        do {
          const Work work = walk.work();
          const int32_t outer = params.grid.batch_inner.divide(work.batch_idx);
          // mutant: first_block_of_a_split
          scales.begin(work.m_idx, work.n_idx, outer, work.batch_idx - outer * params.batch_inner, work.first_k_block);
          int32_t boxes = 0;
          if constexpr (Boxes::kHasAny) boxes = Boxes::stages(params);
#pragma unroll 1
          for (int32_t i = 0; i < params.k_blocks + boxes; ++i, state.advance()) {
            ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
            if (i < params.k_blocks) {
              scales.load(state.stage);
            } else {
              ptx::mbarrier_arrive(pipeline.full(state.stage));
            }
          }
        } while (walk.next(params));
      }
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegisters>();  // mutant: too_many_registers
    compute_tiles<T>(params, shared, pipeline, walk, stages, group - 1, cta_rank);
  }
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::wgmma_family
