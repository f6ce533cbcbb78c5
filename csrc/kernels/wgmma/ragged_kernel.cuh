// Grouped products on Hopper, in the two forms of core/ragged_problem.h; the form is the orientation of
// the config (ragged_traits.cuh). Loads, pipeline and multiplication are those of kernel.cuh; what
// differs is which tiles there are, which only the group sizes in device memory tell, and that
// nothing of one group may reach another.
//
//   rows         A of the instruction: a group's weights, M-major (kTransA) or K-major; B: tokens. A
//                tile's tokens end with its group; the instruction's n is the next multiple of 16, and
//                what it multiplies beyond them is not stored. Rows of no group are stored as zeros.
//   contraction  A and B: columns of both operands; K goes over a group's tokens. The last k block is
//                loaded in boxes of 2^i rows, those beyond the group from outside the tensor, where TMA
//                reads zeros: so 0 * 0 is all that the last multiplication adds. Configs that load whole
//                boxes overwrite those rows with zeros instead.
//
// Roles (384 threads):
//   warp 0 (one thread)  producer: keeps kStages loads in flight
//   warp 1               finds the tiles and pushes them into the ring
//   warps 2, 3           copy the tokens where they are gathered (ragged_gather.cuh)
//   warpgroups 1, 2      consumers, cooperative or ping-pong
//
// Pipelines (arrivals that complete a phase):
//   full[stage]   1 (the producer's expect_tx) + the bytes loaded; gathered: + 64
//   empty[stage]  one for each consumer warpgroup that reads the stage, from each block of the cluster
//   order[group]  4: each warp of the other consumer has issued its last multiplication
//   ring          see WorkRing: full 1, empty 1 + 256, or 1 + 64 + 256
//
// Shared memory, from a 1024-byte boundary: as in kernel.cuh, and then the ring.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/multiply.cuh"
#include "kernels/wgmma/ragged_epilogue.cuh"
#include "kernels/wgmma/ragged_gather.cuh"
#include "kernels/wgmma/ragged_store.cuh"
#include "kernels/wgmma/ragged_traits.cuh"

namespace tcgemm::wgmma_family {

// Rows of a K-major tile, `count` (a multiple of 8) of them, in boxes of 8 * 2^i.
template <bool kMulticast>
__device__ __forceinline__ void load_rows(uint8_t* tile, const CUtensorMap* boxes, uint64_t* barrier, uint16_t mask,
                                          int32_t count, int32_t row_idx, int32_t k_idx) {
#pragma unroll 1
  for (int i = 5; i >= 0; --i) {
    const int32_t rows = 8 << i;
    if ((count & rows) == 0) continue;
    if constexpr (kMulticast) {
      ptx::tma_load_4d_multicast(tile, &boxes[i], barrier, mask, k_idx, row_idx, 0, 0);
    } else {
      ptx::tma_load_4d(tile, &boxes[i], barrier, k_idx, row_idx, 0, 0);
    }
    tile += rows * 128;
    row_idx += rows;
  }
}

// The number of the smallest box of 8 * 2^i rows that holds `count`.
__device__ __forceinline__ int box_of(int32_t count) {
  int i = 0;
  while (8 << i < count) ++i;
  return i;
}

// The same in one box, which may hold rows past the last: of blocks that share a tile, the first ones load
// rows of those after them too, as they do themselves.
template <bool kMulticast>
__device__ __forceinline__ void load_box(uint8_t* tile, const CUtensorMap* boxes, uint64_t* barrier, uint16_t mask,
                                         int32_t count, int32_t row_idx, int32_t k_idx) {
  const CUtensorMap* box = &boxes[box_of(count)];
  if constexpr (kMulticast) {
    ptx::tma_load_4d_multicast(tile, box, barrier, mask, k_idx, row_idx, 0, 0);
  } else {
    ptx::tma_load_4d(tile, box, barrier, k_idx, row_idx, 0, 0);
  }
}

// One k block of an operand with rows of K, of whose rows from k_idx on only `valid` are there. The
// rest is loaded from beyond `end`, the last row of the tensor. Boxes lie on multiples of their size
// whichever way they fall, as the swizzle wants it.
template <int kExtent, int kSharers, typename T>
__device__ __forceinline__ void load_masked(uint8_t* tile, const CUtensorMap* boxes, uint64_t* barrier, uint16_t mask,
                                            int part, int32_t first_idx, int32_t k_idx, int32_t valid, int32_t end) {
  constexpr int kRows = T::kTileK / kSharers;
  const int32_t own_valid = min(max(valid - part * kRows, 0), kRows), zeros = kRows - own_valid;
#pragma unroll 1
  for (int chunk = 0; chunk < kExtent / T::kChunk; ++chunk) {
    uint8_t* target = tile + (chunk * T::kTileK + part * kRows) * 128;
    int32_t row = k_idx + part * kRows;
    const auto load = [&](int i, int32_t from) {
      if constexpr (kSharers > 1) {
        ptx::tma_load_4d_multicast(target, &boxes[i], barrier, mask, first_idx + chunk * T::kChunk, from, 0, 0);
      } else {
        ptx::tma_load_4d(target, &boxes[i], barrier, first_idx + chunk * T::kChunk, from, 0, 0);
      }
      target += 128 << i;
    };
#pragma unroll 1
    for (int i = 6; i >= 0; --i) {
      if (own_valid >> i & 1) {
        load(i, row);
        row += 1 << i;
      }
    }
#pragma unroll 1
    for (int i = 0; i <= 6; ++i) {
      if (zeros >> i & 1) load(i, end);
    }
  }
}

// One k block of a group's weights with rows of K; of a gated product, 64 columns of both matrices in turn.
template <typename Config, typename T>
__device__ __forceinline__ void load_weights(uint8_t* tile, const CUtensorMap* map, uint64_t* barrier, int32_t m_idx,
                                             int32_t k_idx, int32_t group, bool gated) {
#pragma unroll 1
  for (int chunk = 0; chunk < Config::kTileM / T::kChunk; ++chunk) {
    const int32_t column = m_idx + (gated ? chunk / 2 : chunk) * T::kChunk;
    ptx::tma_load_4d(tile + chunk * T::kTileK * 128, map, barrier, column, k_idx, gated ? chunk % 2 : 0, group);
  }
}

// Overwrites rows `begin` to the next multiple of the instruction's along K in all chunks of a stage, by the
// consumers that multiply from it; these are all done when it returns. Without a branch of some threads: the
// compiler would take the stage's number for one that differs between them, and move descriptors.
template <typename Config, typename T>
__device__ __forceinline__ void zero_rows(uint8_t* stage, int32_t begin, int consumer, int thread_idx,
                                          uint32_t barrier_id) {
  constexpr int kChunks = (Config::kTileM + T::kPaddedN) / T::kChunk, kRows = T::kMmaK;
  constexpr int kSharers = Config::kPingPong ? 1 : Config::kConsumers;
  static_assert(kRows * 8 == 128 && kChunks % kSharers == 0, "a thread has 16 bytes of each of its chunks");
  const int32_t row = begin / kRows * kRows + thread_idx / 8;
  const uint32_t address = ptx::shared_address(stage) + row * 128 + thread_idx % 8 * 16;
#pragma unroll
  for (int i = 0; i < kChunks / kSharers; ++i) {
    const int chunk = i * kSharers + (kSharers == 1 ? 0 : consumer);
    ptx::st_shared_zeros_16(address + chunk * T::kTileK * 128, row >= begin);
  }
  ptx::fence_proxy_async();
  // Consumers that share a stage have a barrier of their own.
  ptx::named_barrier_sync(kSharers == 1 ? barrier_id : 1 + Config::kConsumers, 128 * kSharers);
}

// Calls f with the one of kStep, 2 * kStep ... kMax that `width` is, as a constant.
template <int kStep, int kMax, typename Visitor>
__device__ __forceinline__ void visit_width(int32_t width, Visitor&& f) {
  if constexpr (kMax > kStep) {
    if (width < kMax) {
      visit_width<kStep, kMax - kStep>(width, f);
      return;
    }
  }
  f(std::integral_constant<int, kMax>{});
}

template <typename Config, typename In, int kTransA, typename Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    ragged_kernel(const __grid_constant__ RaggedParams<Epilogue> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = RaggedTraits<Config, In, kTransA, Epilogue>;
  constexpr int kTransB = T::kIsRows ? 0 : 1;
  extern __shared__ uint8_t unaligned_shared[];
  uint8_t* shared = align_shared(unaligned_shared);
  const Pipeline<Config, T> pipeline(shared);
  typename T::Ring ring(shared + T::kRingOffset);
  const Params<Epilogue>& gemm = params.gemm;

  // Whether warps 2 and 3 load the tokens.
  const bool gathers = [&] {
    if constexpr (T::kGatherThreads > 0) return gemm.epilogue.gather != nullptr;
    return false;
  }();

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int rank_m = Config::kClusterM == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
  constexpr uint16_t kMask = (1u << Config::kClusterM) - 1;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&gemm.a_map);
    ptx::prefetch_tensormap(&gemm.d_map);
    pipeline.init(gathers ? 1 + T::kGatherThreads : 1);
    ring.init();
    ptx::fence_mbarrier_init();
  }
  start_block<Config>();

  const auto num_k_blocks = [&](const RaggedWork& work) {
    if (!T::kIsRows) return (work.num_tokens() + T::kTileK - 1) / T::kTileK;
    return work.tokens.group < 0 ? 0 : (gemm.k + T::kTileK - 1) / T::kTileK;
  };
  // What the instruction multiplies: at most what tokens need, in whole swizzle groups of each block.
  const auto width_of = [&](const RaggedWork& work) {
    return (work.num_tokens() + T::kWidthStep - 1) / T::kWidthStep * T::kWidthStep;
  };

  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegisters>();
    if (threadIdx.x == 0) {
      PipelineState<T::kStages> state;
      for (;;) {
        const RaggedWork work = ring.pop();
        if (work.tokens.group == RaggedWork::kEnd) break;
        const int32_t k_blocks = num_k_blocks(work);
        for (int32_t i = 0; i < k_blocks; ++i, state.advance()) {
          ptx::mbarrier_wait(&pipeline.empty[state.stage], state.phase ^ 1);
          uint64_t* barrier = &pipeline.full[state.stage];
          uint8_t* a = shared + state.stage * T::kStageBytes;
          uint8_t* b = a + T::kABytes;
          if constexpr (T::kIsRows) {
            const int32_t width = width_of(work), own = width / Config::kClusterM;
            const int32_t loaded_rows = kLoadsWholeBoxes<Config> ? (8 << box_of(own)) * Config::kClusterM : width;
            ptx::mbarrier_arrive_expect_tx(barrier, T::kABytes + (gathers ? 0 : loaded_rows * 128));
            if constexpr (Epilogue::kFused) {
              load_weights<Config, T>(a, &gemm.a_map, barrier, work.m_idx, i * T::kTileK, work.tokens.group,
                                      gemm.epilogue.gated);
            } else {
              load_tile<kTransA, Config::kTileM, 1, T>(a, &gemm.a_map, barrier, 0, 0, work.m_idx, i * T::kTileK,
                                                       work.tokens.group, 0);
            }
            if (gathers) continue;
            if constexpr (kLoadsWholeBoxes<Config>) {
              load_box<(Config::kClusterM > 1)>(b + rank_m * own * 128, params.b_boxes, barrier, kMask, own,
                                                work.tokens.token_begin + rank_m * own, i * T::kTileK);
              continue;
            }
            load_rows<(Config::kClusterM > 1)>(b + rank_m * own * 128, params.b_boxes, barrier, kMask, own,
                                               work.tokens.token_begin + rank_m * own, i * T::kTileK);
          } else {
            const int32_t k_idx = work.tokens.token_begin + i * T::kTileK, valid = work.tokens.token_end - k_idx;
            ptx::mbarrier_arrive_expect_tx(barrier, T::kLoadedBytes);
            if (kLoadsWholeBoxes<Config> || valid >= T::kTileK) {
              load_tile<1, Config::kTileM, 1, T>(a, &gemm.a_map, barrier, 0, 0, work.m_idx, k_idx, 0, 0);
              load_tile<1, T::kPaddedN, Config::kClusterM, T>(b, &gemm.b_map, barrier, kMask, rank_m, work.n_idx, k_idx,
                                                              0, 0);
            } else {
              load_masked<Config::kTileM, 1, T>(a, params.a_boxes, barrier, 0, 0, work.m_idx, k_idx, valid,
                                                params.groups.tokens);
              load_masked<T::kPaddedN, Config::kClusterM, T>(b, params.b_boxes, barrier, kMask, rank_m, work.n_idx,
                                                             k_idx, valid, params.groups.tokens);
            }
          }
        }
      }
      // Not earlier: blocks of the next kernel would wait on SMs that have no tile of ours.
      ptx::griddepcontrol_launch_dependents();
    } else if (threadIdx.x / 32 == 1) {
      using Tiles = std::conditional_t<T::kIsRows, RowTiles<Config>, ContractionTiles<Config>>;
      Tiles tiles;
      const auto clusters = [](int32_t extent, int32_t tile) { return (extent + tile - 1) / tile; };
      if constexpr (T::kIsRows) {
        int32_t tile_columns = Config::kTileM;
        if constexpr (Epilogue::kFused) tile_columns = gemm.epilogue.template tile_columns<Config>();
        tiles = {clusters(gemm.m, tile_columns * Config::kClusterM), tile_columns};
      } else {
        tiles = {clusters(gemm.m, Config::kTileM * Config::kClusterM), clusters(gemm.n, Config::kTileN)};
      }
      SegmentWalk<Tiles> walk(params.groups, tiles);
      RaggedWork work;
      for (int32_t tile = blockIdx.x / Config::kClusterM;; tile += gridDim.x / Config::kClusterM) {
        int32_t in_segment;
        if (!walk.find(tile, &work.tokens, &in_segment)) break;
        tiles.locate(in_segment, rank_m, &work);
        if (threadIdx.x % 32 == 0) ring.push(work);
      }
      work.tokens.group = RaggedWork::kEnd;
      if (threadIdx.x % 32 == 0) ring.push(work);
    } else if (threadIdx.x / 32 >= 2) {
      if constexpr (T::kGatherThreads > 0) {
        PipelineState<T::kStages> state;
        for (;;) {
          const RaggedWork work = ring.pop();
          if (work.tokens.group == RaggedWork::kEnd) break;
          if (!gathers) continue;
          const TokenGather<Config, T> gather(gemm.epilogue, gemm.k, work, threadIdx.x % T::kGatherThreads);
          const int32_t k_blocks = num_k_blocks(work);
          for (int32_t i = 0; i < k_blocks; ++i, state.advance()) {
            ptx::mbarrier_wait(&pipeline.empty[state.stage], state.phase ^ 1);
            gather.load(shared + state.stage * T::kStageBytes + T::kABytes, &pipeline.full[state.stage], width_of(work),
                        i);
          }
        }
      }
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegisters>();
    const int consumer = group - 1, thread_idx = threadIdx.x % 128;
    uint8_t* store_buffers = shared + T::kStoreOffset + consumer * 2 * T::kStoreBytes;
    int buffer_idx = 0;
    const uint32_t barrier_id = 1 + consumer;
    // Thread i tells the producer of the i-th block of the cluster that a stage is free.
    const auto release = [&](int stage) {
      if constexpr (Config::kClusterM == 1) {
        if (thread_idx == 0) ptx::mbarrier_arrive(&pipeline.empty[stage]);
      } else {
        if (thread_idx < Config::kClusterM) ptx::mbarrier_arrive_remote(&pipeline.empty[stage], thread_idx);
      }
    };

    const uint32_t first_row_bytes = Config::kPingPong ? 0 : consumer * T::kRowsPerGroup * 128;
    PipelineState<T::kStages> state;
    uint32_t turn = 0;
    for (int32_t sequence = 0;; ++sequence) {
      const RaggedWork work = ring.pop_by_warp();
      if (work.tokens.group == RaggedWork::kEnd) break;
      const int32_t k_blocks = num_k_blocks(work);
      if (Config::kPingPong && (sequence & 1) != consumer) {
        state.advance(k_blocks);
        continue;
      }
      if constexpr (Config::kPingPong) {
        // Group 0 begins; from then on each one waits for the other's previous tile.
        if (sequence > 0) {
          ptx::mbarrier_wait(&pipeline.order[consumer], turn);
          turn ^= 1;
        }
      }

      float acc[T::kBlocksM][Config::kTileN / 2];
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
        for (int i = 0; i < Config::kTileN / 2; ++i) acc[block][i] = 0.0f;
      }
      const auto multiply = [&](auto width) {
        int previous_stage = -1;
        const auto multiply_block = [&](auto steps) {
          const uint32_t a = ptx::shared_address(shared + state.stage * T::kStageBytes) + first_row_bytes;
          const uint32_t b = ptx::shared_address(shared + state.stage * T::kStageBytes + T::kABytes);
          multiply_from_shared<T, In, kTransA, kTransB, decltype(width)::value, decltype(steps)::value>(
              acc, a, b, true, [&] {
                if (previous_stage >= 0) release(previous_stage);
              });
          previous_stage = state.stage;
          state.advance();
        };
        // Rows of the last k block, where it is not multiplied as a whole; else 0.
        int32_t tail = 0;
        if constexpr (!T::kIsRows && kLoadsWholeBoxes<Config>) tail = work.num_tokens() % T::kTileK;
        const int32_t whole_blocks = tail > 0 ? k_blocks - 1 : k_blocks;
#pragma unroll 1
        for (int32_t i = 0; i < whole_blocks; ++i) {
          ptx::mbarrier_wait(&pipeline.full[state.stage], state.phase);
          // What threads have copied, before what the multiplication reads.
          if (gathers) ptx::fence_proxy_async();
          multiply_block(std::integral_constant<int, 0>{});
        }
        if constexpr (!T::kIsRows && kLoadsWholeBoxes<Config>) {
          if (tail > 0) {
            ptx::mbarrier_wait(&pipeline.full[state.stage], state.phase);
            zero_rows<Config, T>(shared + state.stage * T::kStageBytes, tail, consumer, thread_idx, barrier_id);
            visit_width<1, T::kTileK / T::kMmaK>((tail + T::kMmaK - 1) / T::kMmaK, multiply_block);
          }
        }
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand(acc[block]);
        if (previous_stage >= 0) release(previous_stage);
      };
      if constexpr (T::kIsRows) {
        visit_width<T::kWidthStep, T::kMaxWidth>(width_of(work), multiply);
      } else {
        multiply(std::integral_constant<int, Config::kTileN>{});
      }
      if constexpr (Config::kPingPong) pipeline.pass_turn(consumer, thread_idx);

      if constexpr (Epilogue::kFused) {
        store_fused_tokens<Config>(acc, gemm, store_buffers, buffer_idx, consumer * T::kRowsPerGroup, work, barrier_id);
      } else {
#pragma unroll
        for (int block = 0; block < T::kBlocksM; ++block) {
          const int32_t m_idx = work.m_idx + (Config::kPingPong ? 0 : consumer * T::kRowsPerGroup) + block * 64;
          if constexpr (!T::kIsRows) {
            if (gemm.out_type == FloatType::kF32) {
              store_rows<Config, Epilogue, 4>(acc[block], gemm, store_buffers, buffer_idx, m_idx, work.n_idx,
                                              work.tokens.group, barrier_id);
            } else {
              store_rows<Config, Epilogue, 2>(acc[block], gemm, store_buffers, buffer_idx, m_idx, work.n_idx,
                                              work.tokens.group, barrier_id);
            }
          } else if (gemm.out_type == FloatType::kF32) {
            store_tokens<Config, Epilogue, float>(acc[block], gemm, store_buffers, buffer_idx, m_idx, work, barrier_id);
          } else {
            store_tokens<Config, Epilogue, uint16_t>(acc[block], gemm, store_buffers, buffer_idx, m_idx, work,
                                                     barrier_id);
          }
        }
      }
    }
    if (thread_idx == 0) ptx::tma_store_wait_read<0>();
  }
  end_block<Config>();
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::wgmma_family
