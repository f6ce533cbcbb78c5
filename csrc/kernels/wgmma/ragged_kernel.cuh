// Grouped products on Hopper, in the two forms of core/ragged_problem.h; the form is the orientation of
// the config (ragged_traits.cuh). Loads, pipeline and multiplication are those of kernel.cuh; what
// differs is which tiles there are, which only the group sizes in device memory tell, and that
// nothing of one group may reach another.
//
//   rows         A of the instruction: a group's weights, M-major or K-major; B: tokens. A
//                tile's tokens end with its group, but are loaded in whole boxes; the instruction's n is what
//                the tokens need, and what it multiplies beyond them is not stored. Rows of no group are
//                stored as zeros.
//   contraction  A and B: columns of both operands; K goes over a group's tokens. The last k block is
//                loaded as a whole; of its rows beyond the group the consumers overwrite with zeros
//                what they then multiply by, so that 0 * 0 is all that those add. Tokens last, in rows
//                of both, a k block begins at a multiple of its length, so that it has the scales of
//                one block: of the first and of the last one what is not the group's is overwritten.
//
// Roles (384 threads):
//   warp 0 (one thread)  producer: keeps kStages loads in flight
//   warp 1               finds the tiles and pushes them into the ring
//   warps 2, 3           copy the tokens where they are gathered (ragged_gather.cuh); or load block scales
//   warpgroups 1, 2      consumers, each of half of the tile's rows
//
// Pipelines (arrivals that complete a phase):
//   full[stage]   1 (the producer's expect_tx) + the bytes loaded; gathered, or with scales: + 64
//   empty[stage]  one for each consumer warpgroup that reads the stage, or each of its warps where it reads scales,
//                 from each block of the cluster
//   ring          see WorkRing: full 1, empty 1 + 256, or 1 + 64 + 256
//
// Shared memory, from a 1024-byte boundary: as in kernel.cuh, and then the ring.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/wgmma/loads.cuh"
#include "kernels/wgmma/multiply.cuh"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/ragged_function.cuh"
#include "kernels/wgmma/ragged_gather.cuh"
#include "kernels/wgmma/ragged_store.cuh"
#include "kernels/wgmma/ragged_traits.cuh"

namespace tcgemm::wgmma_family {

// One k block of a group's weights, with a row for each k or, of a gated product alone, for each column; gated, 64
// columns of both matrices in turn. Each of the blocks that multiply by them loads an equal part for all of them.
template <typename T>
__device__ __forceinline__ void load_weights(uint32_t tile, const CUtensorMap* map, uint32_t barrier, uint16_t mask,
                                             int part, int32_t m_idx, int32_t k_idx, int32_t group, bool gated) {
  using A = typename T::A;
  constexpr int kColumns = A::kIsKMajor ? 64 : A::kChunk, kChunkBytes = (A::kIsKMajor ? kColumns : T::kTileK) * 128;
  constexpr int kChunks = A::kExtent / kColumns / T::Config::kClusterN;
#pragma unroll 1
  for (int chunk = part * kChunks; chunk < (part + 1) * kChunks; ++chunk) {
    const int32_t column = m_idx + (gated ? chunk / 2 : chunk) * kColumns;  // mutant: weights_of_the_first_columns
    // mutant: gates_weights_twice
    ptx::tma_load_4d_multicast(tile + chunk * kChunkBytes, map, barrier, mask, A::kIsKMajor ? k_idx : column,
                               A::kIsKMajor ? column : k_idx, gated ? chunk % 2 : 0, group);
  }
}

// Overwrites rows `begin` to the next multiple of the instruction's along K in all chunks of a stage, by the
// consumers that multiply from it; these are all done when it returns. Without a branch of some threads: the
// compiler would take the stage's number for one that differs between them, and move descriptors.
template <typename T>
__device__ __forceinline__ void zero_rows(uint32_t stage, int32_t begin, int consumer, int thread_idx) {
  using A = typename T::A;
  using B = typename T::B;
  using Config = typename T::Config;
  constexpr int kChunks = A::kExtent / A::kChunk + B::kExtent / B::kChunk, kRows = T::kMmaK;
  static_assert(kRows * 8 == 128 && kChunks % Config::kConsumers == 0, "a thread has 16 bytes of each of its chunks");
  const int32_t row = begin / kRows * kRows + thread_idx / 8;
  const uint32_t address = stage + row * 128 + thread_idx % 8 * 16;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk += Config::kConsumers) {
    ptx::st_shared_zeros_16(address + (chunk + consumer) * T::kTileK * 128, row >= begin);
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(1 + Config::kConsumers, 128 * Config::kConsumers);
}

// Of rows of K: overwrites all but the tokens `begin` to `end` of a stage, as zero_rows does. A thread has 16 bytes of
// every row that is its own.
template <typename T>
__device__ __forceinline__ void zero_other_tokens(uint32_t stage, int32_t begin, int32_t end, int consumer,
                                                  int thread_idx) {
  using Config = typename T::Config;
  constexpr int kRows = T::A::kExtent + T::B::kExtent, kRowsAtOnce = 128 * Config::kConsumers / 8;
  constexpr int kTokensOfWord = 4 / sizeof(typename T::A::Element);
  static_assert(T::kABytes == T::A::kExtent * 128 && kRows % kRowsAtOnce == 0, "rows of B follow those of A");
  const int unit = thread_idx % 8;  // of the tokens; the swizzle flips its bits by those of the row
  uint32_t kept[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t token = (unit * 4 + i) * kTokensOfWord;
    const auto bits_before = [&](int32_t x) { return min(max(x - token, 0), kTokensOfWord) * (32 / kTokensOfWord); };
    // mutant: tokens_after_the_group, tokens_before_the_group
    kept[i] = static_cast<uint32_t>((uint64_t{1} << bits_before(end)) - (uint64_t{1} << bits_before(begin)));
  }
#pragma unroll 4
  // mutant: a_consumers_part_is_left_out, rows_of_a_alone
  for (int row = consumer * 16 + thread_idx / 8; row < kRows; row += kRowsAtOnce) {
    const uint32_t address = stage + row * 128 + (unit ^ row % 8) * 16;  // mutant: not_as_it_is_swizzled
    const uint4 own = ptx::ld_shared_v4_u32(address);
    ptx::st_shared_v4_u32(address, {own.x & kept[0], own.y & kept[1], own.z & kept[2], own.w & kept[3]});
  }
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(1 + Config::kConsumers, 128 * Config::kConsumers);  // mutant: not_before_it_is_multiplied
}

// Per-row and per-column scales of a tile, each for all of K: a thread has the scales of its own rows, and its part of
// the scales of its warp's columns.
template <typename T>
class AccumulatorScales {
  static constexpr int kGroups = T::Config::kTileN / 8;  // of eight columns, of which four threads have two each

 public:
  // Constructed before the accumulators are complete, so that they need not wait for the scales.
  template <typename Epilogue>
  __device__ __forceinline__ AccumulatorScales(const Params<Epilogue>& params, int32_t m_idx, int32_t n_idx,
                                               int32_t entry, int thread_idx)
      : is_scaled_(params.a_scales.data != nullptr), lane_(thread_idx % 32) {
    // Rows past the end take any scale: their accumulators are not stored.
    const auto scale = [&](const StridedScales& of, int32_t row) {
      if (!is_scaled_) return 1.0f;
      // mutant: of_all_alike
      return __ldcg(of.data + entry * of.outer_stride + min(row, of.num_rows - 1) * of.row_stride);
    };
#pragma unroll
    for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block * 64 + thread_idx / 32 * 16 + half * 8 + lane_ / 4;
        of_rows_[block][half] = scale(params.a_scales, m_idx + row);  // mutant: row_scales_of_the_first_tile
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; i += 8) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // mutant: column_scales_of_the_first_tile
        of_columns_[i / 8][j] = scale(params.b_scales, n_idx + (i + lane_ / 4) * 8 + lane_ % 4 * 2 + j);
      }
    }
  }

  __device__ __forceinline__ void apply(float (&acc)[T::kBlocksM][T::Config::kTileN / 2]) const {
    if (!is_scaled_) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // mutant: of_the_first_columns_of_a_lane, of_another_lane
        const float of_column = __shfl_sync(~0u, of_columns_[group / 8][j], group % 8 * 4 + lane_ % 4);
#pragma unroll
        for (int block = 0; block < T::kBlocksM; ++block) {
          acc[block][group * 4 + j] *= of_rows_[block][0] * of_column;
          acc[block][group * 4 + 2 + j] *= of_rows_[block][1] * of_column;  // mutant: of_the_row_before
        }
      }
    }
  }

 private:
  const bool is_scaled_;
  const int lane_;
  float of_rows_[T::kBlocksM][2];
  float of_columns_[(kGroups + 7) / 8][2];
};

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

template <typename Config, typename Mma, typename Operands, typename Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    ragged_kernel(const __grid_constant__ RaggedParams<Epilogue> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = RaggedTraits<Config, Mma, Operands, Epilogue>;
  using A = typename T::A;
  using B = typename T::B;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_base_address(shared_memory);
  const Pipeline<T> pipeline(shared);
  typename T::Ring ring(shared_memory + T::kRingOffset);
  const Params<Epilogue>& gemm = params.gemm;

  constexpr bool kIsGated = Epilogue::kIsGated;

  // Whether warps 2 and 3 load the tokens.
  const bool gathers = [&] {
    if constexpr (T::kGatherThreads > 0) return params.gather.indices != nullptr;
    return false;
  }();

  // Shuffled so that the compiler knows it is the same in a whole warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  const int rank = static_cast<int>(cluster_rank<Config>());
  const int rank_m = rank % Config::kClusterM, rank_n = rank / Config::kClusterM;
  constexpr uint16_t kMask = (1u << Config::kClusterSize) - 1;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensormap(&gemm.a_map);
    ptx::prefetch_tensormap(&gemm.d_map);
    // mutant: nobody_waits_for_them
    pipeline.init(gathers ? 1 + T::kGatherThreads : T::kIsScaled ? 1 + kScaleThreads : 1);
    ring.init();
    ptx::fence_mbarrier_init();
  }
  if constexpr (Config::kClusterSize > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  ptx::griddepcontrol_wait();

  // Of a contraction: the token that the first k block begins at.
  const auto first_token = [](const RaggedWork& work) {
    const int32_t begin = work.tokens.token_begin;
    return T::kTokensLast ? begin / T::kTileK * T::kTileK : begin;  // mutant: from_the_groups_first_token
  };
  const auto num_k_blocks = [&](const RaggedWork& work) {
    if (!T::kIsRows && work.num_tokens() == 0) return 0;
    // mutant: a_block_too_few
    if (!T::kIsRows) return (work.tokens.token_end - first_token(work) + T::kTileK - 1) / T::kTileK;
    return work.tokens.group < 0 ? 0 : (gemm.k + T::kTileK - 1) / T::kTileK;
  };
  // What the instruction multiplies: what tokens need.
  const auto width_of = [&](const RaggedWork& work) {
    return (max(work.num_tokens(), 1) + T::kWidthStep - 1) / T::kWidthStep * T::kWidthStep;
  };

  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) {
      PipelineState state{T::kStages};
      for (;;) {
        const RaggedWork work = ring.pop();
        if (work.tokens.group == RaggedWork::kEnd) break;
        const int32_t k_blocks = num_k_blocks(work);
#pragma unroll 1  // as in kernel.cuh
        for (int32_t i = 0; i < k_blocks; ++i, state.advance()) {
          ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
          const uint32_t barrier = pipeline.full(state.stage);
          const uint32_t a = shared + state.stage * T::kStageBytes;
          const uint32_t b = a + T::kABytes;
          if constexpr (T::kIsRows) {
            // Whole swizzle groups.
            const int32_t own = (width_of(work) / Config::kClusterM + 7) / 8 * 8, box = (own - 1) / kBoxStep;
            const int32_t token_bytes = gathers ? 0 : (box + 1) * kBoxStep * Config::kClusterM * 128;
            ptx::mbarrier_arrive_expect_tx(barrier, T::kABytes + token_bytes);
            if constexpr (T::kSharesWeights) {
              load_weights<T>(a, &gemm.a_map, barrier, kMask, rank_n, work.m_idx, i * T::kTileK, work.tokens.group,
                              kIsGated);
            } else {
              load_tile<A, 1>(a, &gemm.a_map, barrier, 0, 0, work.m_idx, i * T::kTileK, 0, work.tokens.group);
            }
            if (!gathers) {
              // The box may hold rows past the last: of blocks that share a tile, the first ones load rows of those
              // after them too, as they do themselves.
              load_box<Config::kClusterM>(b + rank_m * own * 128, &params.token_boxes[box], barrier, kMask,
                                          i * T::kTileK, work.tokens.token_begin + rank_m * own, 0, 0);
            }
          } else {
            const int32_t k_idx = first_token(work) + i * T::kTileK;
            ptx::mbarrier_arrive_expect_tx(barrier, T::kLoadedBytes);
            load_tile<A, 1>(a, &gemm.a_map, barrier, 0, 0, work.m_idx, k_idx, 0, 0);
            load_tile<B, Config::kClusterM>(b, &gemm.b_map, barrier, kMask, rank_m, work.n_idx, k_idx, 0, 0);
          }
        }
      }
      // Not earlier: blocks of the next kernel would wait on SMs that have no tile of ours.
      ptx::griddepcontrol_launch_dependents();
      pipeline.drain(state);
    } else if (warp == 1) {
      using Tiles = std::conditional_t<T::kIsRows, RowTiles<Config>, ContractionTiles<Config>>;
      Tiles tiles;
      const auto clusters = [](int32_t extent, int32_t tile) { return (extent + tile - 1) / tile; };
      if constexpr (T::kIsRows) {
        const int32_t tile_columns = kIsGated ? Config::kTileM / 2 : Config::kTileM;  // mutant: tiles_too_far_apart
        tiles = {clusters(gemm.m, tile_columns * Config::kClusterM), tile_columns};
      } else {
        tiles = {clusters(gemm.m, Config::kTileM * Config::kClusterM), clusters(gemm.n, Config::kTileN)};
      }
      SegmentWalk<Tiles> walk(params.groups, tiles);
      RaggedWork work;
      for (int32_t tile = blockIdx.x / Config::kClusterSize;; tile += gridDim.x / Config::kClusterSize) {
        int32_t in_segment;
        if (!walk.find(tile, &work.tokens, &in_segment)) break;
        tiles.locate(in_segment, rank_m, rank_n, &work);
        if (threadIdx.x % 32 == 0) ring.push(work);
      }
      work.tokens.group = RaggedWork::kEnd;
      if (threadIdx.x % 32 == 0) ring.push(work);
    } else if (warp >= 2) {
      if constexpr (T::kIsScaled) {
        ScaleLoader<T, Epilogue> scales(gemm, shared, pipeline, threadIdx.x - 32 * kFirstScaleWarp);
        PipelineState state{T::kStages};
        for (;;) {
          const RaggedWork work = ring.pop();
          if (work.tokens.group == RaggedWork::kEnd) break;
          // mutant: scales_of_the_first_k_block
          const int32_t first_k_block = T::kIsRows ? 0 : first_token(work) / T::kTileK;
          // mutant: scales_of_the_first_columns, scales_of_the_first_tokens, scales_of_the_first_group
          scales.begin(work.m_idx, work.n_idx, params.entry, work.tokens.group, first_k_block);
          const int32_t k_blocks = num_k_blocks(work);
          for (int32_t i = 0; i < k_blocks; ++i, state.advance()) {
            ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
            scales.load(state.stage);
          }
        }
      }
      if constexpr (T::kGatherThreads > 0) {
        PipelineState state{T::kStages};
        for (;;) {
          const RaggedWork work = ring.pop();
          if (work.tokens.group == RaggedWork::kEnd) break;
          if (!gathers) continue;
          const TokenGather<T> gather(params.gather, gemm.k, work, threadIdx.x % T::kGatherThreads);
          const int32_t k_blocks = num_k_blocks(work);
          for (int32_t i = 0; i < k_blocks; ++i, state.advance()) {
            ptx::mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
            gather.load(shared + state.stage * T::kStageBytes + T::kABytes, pipeline.full(state.stage), width_of(work),
                        i);
          }
        }
      }
    }
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegisters>();
    const int consumer = group - 1, thread_idx = threadIdx.x % 128;
    const uint32_t store_buffers = shared + T::kStoreOffset + consumer * 2 * T::kStoreBytes;
    int buffer_idx = 0;
    const uint32_t barrier_id = 1 + consumer;
    // Thread i, of each warp where those release, tells the producer of the i-th block of the cluster that a stage is
    // free.
    const int releasing_idx = T::kIsScaled ? thread_idx % 32 : thread_idx;  // mutant: released_twice
    const auto release = [&](int stage) {
      if constexpr (T::kIsScaled) __syncwarp();
      if constexpr (Config::kClusterSize == 1) {
        if (releasing_idx == 0) ptx::mbarrier_arrive(pipeline.empty(stage));
      } else {
        if (releasing_idx < Config::kClusterSize) ptx::mbarrier_arrive_remote(pipeline.empty(stage), releasing_idx);
      }
    };

    const int first_row = consumer * T::kRowsPerGroup;
    [[maybe_unused]] Scales<T> scales(shared, first_row, thread_idx);
    PipelineState state{T::kStages};
    for (;;) {
      const RaggedWork work = ring.pop_by_warp();
      if (work.tokens.group == RaggedWork::kEnd) break;
      const int32_t k_blocks = num_k_blocks(work);
      // Of D, where the weights are A.
      // mutant: consumers_of_the_same_columns
      const int32_t column = work.m_idx + (kIsGated ? first_row / 2 : first_row);
      if constexpr (Epilogue::kIsFunction) {
        prefetch_function_of_tokens<typename Epilogue::Code>(gemm.epilogue.values, params.entry, column,
                                                             kIsGated ? 64 : T::kRowsPerGroup, work);
      }

      [[maybe_unused]] FunctionOfTokens<T, Epilogue> function(gemm.epilogue, params.entry, column, work);

      float acc[T::kBlocksM][Config::kTileN / 2];
#pragma unroll
      for (int block = 0; block < T::kBlocksM; ++block) {
#pragma unroll
        for (int i = 0; i < Config::kTileN / 2; ++i) acc[block][i] = 0.0f;  // mutant: accumulators_of_the_tile_before
      }
      const auto multiply = [&](auto width) {
        [[maybe_unused]] int previous_stage = -1;
        const auto multiply_block = [&](auto steps) {
          const uint32_t a = shared + state.stage * T::kStageBytes + first_row * 128;
          const uint32_t b = shared + state.stage * T::kStageBytes + T::kABytes;
          if constexpr (T::kPromotes) {
            scales.go_to(state.stage);  // mutant: another_stages
            multiply_and_promote<T, decltype(width)::value>(acc, a, b, scales, [&] { release(state.stage); });
          } else {
            multiply_from_shared<T, decltype(width)::value, decltype(steps)::value>(acc, a, b, true, [&] {
              if (previous_stage >= 0) release(previous_stage);
            });
            previous_stage = state.stage;
          }
          state.advance();
        };
        // Rows of the last k block, where it is not multiplied as a whole; else 0.
        const int32_t tail = T::kIsRows || T::kTokensLast ? 0 : work.num_tokens() % T::kTileK;
        const int32_t whole_blocks = tail > 0 ? k_blocks - 1 : k_blocks;
#pragma unroll 1
        for (int32_t i = 0; i < whole_blocks; ++i) {
          ptx::mbarrier_wait(pipeline.full(state.stage), state.phase);
          // What threads have copied, before what the multiplication reads.
          if (gathers) ptx::fence_proxy_async();
          if constexpr (T::kTokensLast) {
            const int32_t k_idx = first_token(work) + i * T::kTileK;
            const int32_t begin = work.tokens.token_begin - k_idx, end = work.tokens.token_end - k_idx;
            if (begin > 0 || end < T::kTileK) {  // mutant: the_last_block_alone_is_cut, the_first_block_alone_is_cut
              zero_other_tokens<T>(shared + state.stage * T::kStageBytes, begin, end, consumer, thread_idx);
            }
          }
          multiply_block(std::integral_constant<int, T::kSteps>{});
        }
        if constexpr (!T::kIsRows && !T::kTokensLast) {
          if (tail > 0) {
            ptx::mbarrier_wait(pipeline.full(state.stage), state.phase);
            zero_rows<T>(shared + state.stage * T::kStageBytes, tail, consumer, thread_idx);
            visit_width<1, T::kSteps>((tail + T::kMmaK - 1) / T::kMmaK, multiply_block);
          }
        }
        if constexpr (!T::kPromotes) {
          ptx::wgmma_wait_group<0>();
#pragma unroll
          for (int block = 0; block < T::kBlocksM; ++block) ptx::wgmma_fence_operand<T::kIsInteger>(acc[block]);
          if (previous_stage >= 0) release(previous_stage);
        }
      };
      if constexpr (T::kIsRows) {
        visit_width<T::kWidthStep, Config::kTileN>(width_of(work), multiply);
      } else {
        constexpr std::integral_constant<int, Config::kTileN> width;
        if constexpr (T::kTokensLast && !T::kIsScaled && !T::kIsInteger) {
          const AccumulatorScales<T> of_acc(gemm, work.m_idx + first_row, work.n_idx, params.entry, thread_idx);
          multiply(width);
          of_acc.apply(acc);
        } else {
          multiply(width);
        }
      }

      if constexpr (Epilogue::kIsFunction) {
        function.store(acc, gemm, store_buffers, buffer_idx, column, work, barrier_id);
      } else if constexpr (T::kIsRows) {
        for_blocks_of_columns(acc, column, [&](int32_t begin) {
          store_tokens<Config>(acc[0], gemm, store_buffers, buffer_idx, begin, work, barrier_id);
        });
      } else {
        store_tile<Config, 2>(acc, gemm, gemm.d_map, store_buffers, buffer_idx, work.m_idx + first_row, work.n_idx,
                              work.tokens.group, barrier_id);
      }
    }
    if (thread_idx == 0) ptx::tma_store_wait_read<0>();
  }
#else
  __trap();  // wgmma and TMA exist on sm_90a only; the launcher refuses other devices
#endif
}

}  // namespace tcgemm::wgmma_family
