// D[b,m,n] = epilogue(sum_k op(A)[b,m,k] * op(B)[b,k,n]) with WMMA through shared memory.
//
// A block owns kTileM x kTileN of D and walks K in steps of kTileK; its warps split the tile into
// kWarpM x kWarpN parts, each a grid of WMMA fragments. All warps both copy and multiply.
//
// Pipeline: kStages buffers filled by cp.async, one commit group a step. At step s:
//   wait until group s has landed (kStages - 2 newer ones may be under way); barrier, which also
//   says that everyone is done with buffer (s - 1) % kStages; start step s + kStages - 1 into
//   that buffer; multiply step s.
// Operands whose rows do not start on 16 bytes, or that lie the other way round (Config's
// kAnyLayout), are copied by ordinary loads and stores into the same buffers.
//
// Shared memory, dynamic, aligned to 128 bytes:
//   kStages x A tile, kStages x B tile (operand_tile.cuh);
//   after the last step the same bytes hold, for each warp, kMmaM rows of kWarpN + 8
//   accumulators, through which the warp turns fragments into rows, for what becomes of them (store.cuh).
//
// Limits: compute capability 8.0; single extents below 2^31.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "kernels/wmma/config.h"
#include "kernels/wmma/instructions.cuh"
#include "kernels/wmma/operand_tile.cuh"
#include "kernels/wmma/store.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/wmma.cuh"
#include "tile/gemm_args.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wmma {

template <typename Config, typename In, typename Acc, typename Outputs>
__global__ void __launch_bounds__(TiledShared<Config, In, Acc>::kThreads, Config::kMinBlocks)
    tiled_kernel(const __grid_constant__ GemmArgs<In, Outputs> args) {
  using Shared = TiledShared<Config, In, Acc>;
  using TileA = typename Shared::TileA;
  using TileB = typename Shared::TileB;
  using Rows = StagedRows<Config, Acc>;
  constexpr int kMmaM = Config::kMmaM, kMmaN = Config::kMmaN, kMmaK = Config::kMmaK;
  constexpr int kTileK = Config::kTileK, kStages = Config::kStages;
  constexpr int kFragmentsM = Config::kWarpM / kMmaM, kFragmentsN = Config::kWarpN / kMmaN;
  static_assert(Config::kTileM % Config::kWarpM == 0 && Config::kTileN % Config::kWarpN == 0, "warps tile the block");
  static_assert(Config::kWarpM % kMmaM == 0 && Config::kWarpN % kMmaN == 0, "fragments tile the warp");
  static_assert(kTileK % kMmaK == 0, "a step is whole instructions");
  static_assert(kStages >= 2, "one stage is read while another is filled");
  using Element = fragment_element_t<In>;
  using FragmentA =
      fragment<matrix_a, kMmaM, kMmaN, kMmaK, Element, std::conditional_t<TileA::kAlongK, row_major, col_major>>;
  using FragmentB =
      fragment<matrix_b, kMmaM, kMmaN, kMmaK, Element, std::conditional_t<TileB::kAlongK, col_major, row_major>>;

  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  In* const shared_a = reinterpret_cast<In*>(dynamic_shared);
  In* const shared_b = shared_a + kStages * TileA::kElements;

  const TileCoord tile = args.grid.at(blockIdx.x);
  const int64_t first_m = tile.tile_m_idx * Config::kTileM, first_n = tile.tile_n_idx * Config::kTileN;
  OperandLoader<TileA, Shared::kThreads, Config::kAnyLayout> load_a(
      args.a.at_batch(tile.batch_idx), args.a.ld, Config::kAnyLayout ? !args.a_transposed : Config::kAAlongK,
      args.a_aligned, first_m, args.m, args.k);
  OperandLoader<TileB, Shared::kThreads, Config::kAnyLayout> load_b(
      args.b.at_batch(tile.batch_idx), args.b.ld, Config::kAnyLayout ? args.b_transposed : Config::kBAlongK,
      args.b_aligned, first_n, args.n, args.k);

  const int warp_idx = threadIdx.x / 32;
  const int warp_m = warp_idx % Shared::kWarpsM * Config::kWarpM;
  const int warp_n = warp_idx / Shared::kWarpsM * Config::kWarpN;
  const int num_steps = args.k / kTileK + (args.k % kTileK != 0);

  fragment<accumulator, kMmaM, kMmaN, kMmaK, Acc> acc[kFragmentsM][kFragmentsN];
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) fill_fragment(acc[i][j], Acc(0.0f));
  }

#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < num_steps) {
      load_a.load(shared_a + step * TileA::kElements);
      load_b.load(shared_b + step * TileB::kElements);
    }
    ptx::cp_async_commit_group();
  }
  int read_stage = 0, write_stage = kStages - 1;
  for (int step = 0; step < num_steps; ++step) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < num_steps) {
      load_a.load(shared_a + write_stage * TileA::kElements);
      load_b.load(shared_b + write_stage * TileB::kElements);
    }
    ptx::cp_async_commit_group();
    const In* step_a = shared_a + read_stage * TileA::kElements;
    const In* step_b = shared_b + read_stage * TileB::kElements;
    // The configs that share an instantiation between layouts are the rare ones: small code.
#pragma unroll(Config::kAnyLayout ? 1 : kTileK / kMmaK)
    for (int k = 0; k < kTileK; k += kMmaK) {
      FragmentA a[kFragmentsM];
      FragmentB b[kFragmentsN];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        ptx::wmma_load_shared(a[i], TileA::at(step_a, warp_m + i * kMmaM, k), TileA::kLd);
        round_operand<In>(a[i]);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        ptx::wmma_load_shared(b[j], TileB::at(step_b, warp_n + j * kMmaN, k), TileB::kLd);
        round_operand<In>(b[j]);
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) multiply_accumulate<Config::kSaturate>(acc[i][j], a[i], b[j]);
      }
    }
    read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
    write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();

  // mutant: all_warps_in_one_place
  auto* const staging = reinterpret_cast<Acc*>(dynamic_shared) + warp_idx * Rows::kElements;
  // Of a function rolled, with the registers as a branch: it is long, and then there once.
#pragma unroll(kIsFunction<Outputs> ? 1 : kFragmentsM)
  for (int row = 0; row < kFragmentsM; ++row) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      if (i != row) continue;  // mutant: the_last_fragments
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        store_matrix_sync(staging + j * kMmaN, acc[i][j], Rows::kLd, mem_row_major);
      }
    }
    __syncwarp();
    const int64_t m_idx = first_m + warp_m + row * kMmaM;  // mutant: another_fragments_rows
    // mutant: another_warps_columns
    store_rows(Rows{staging, tile.batch_idx, m_idx, first_n + warp_n, args.m, args.n}, args.outputs);
    __syncwarp();
  }
}

}  // namespace tcgemm::wmma
