// D[b,m,n] = epilogue(sum_k op(A)[b,m,k] * op(B)[b,k,n]) with WMMA, one warp, one output tile.
//
// The first tensor-core rung: fragments are loaded straight from global memory and nothing is
// reused between warps but what the caches give. A block is one warp.
//
// WMMA reads whole tiles whose rows (columns) start on 16 bytes, or on 32 where they are that
// long. Where that holds the loop reads global memory directly; for the rest (the edges of the
// matrix, the last part of K, other strides and bases) the warp first gathers the tile into shared
// memory, zeros outside the matrix.
//
// Shared memory, static: A as kMmaM rows of kMmaK, B as kMmaN rows (columns of B) of kMmaK; then,
// in the same bytes, kMmaM x kMmaN accumulators on their way to the epilogue.
//
// Limits: compute capability 8.0; single extents below 2^31.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "kernels/wmma/config.h"
#include "kernels/wmma/instructions.cuh"
#include "ptx/wmma.cuh"
#include "tile/gemm_args.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wmma {

template <typename Layout_>
struct LayoutTag {
  using Layout = Layout_;
};

template <typename Config, typename In, typename Acc, typename Outputs>
__global__ void __launch_bounds__(32) naive_kernel(const __grid_constant__ GemmArgs<In, Outputs> args) {
  constexpr int kMmaM = Config::kMmaM, kMmaN = Config::kMmaN, kMmaK = Config::kMmaK;
  using Element = fragment_element_t<In>;
  constexpr int kOperandBytes = (kMmaM + kMmaN) * kMmaK * sizeof(In);
  constexpr int kOutputBytes = kMmaM * kMmaN * sizeof(Acc);
  __shared__ __align__(32) unsigned char shared[kOperandBytes > kOutputBytes ? kOperandBytes : kOutputBytes];
  In* const shared_a = reinterpret_cast<In*>(shared);
  In* const shared_b = shared_a + kMmaM * kMmaK;

  const TileCoord tile = args.grid.at(blockIdx.x);
  const int64_t first_m = tile.tile_m_idx * kMmaM, first_n = tile.tile_n_idx * kMmaN;
  // Strides from row to row (column to column) of the tile and along K.
  const int64_t a_stride = args.a_transposed ? 1 : args.a.ld, a_stride_k = args.a_transposed ? args.a.ld : 1;
  const int64_t b_stride = args.b_transposed ? args.b.ld : 1, b_stride_k = args.b_transposed ? 1 : args.b.ld;
  const In* a = args.a.at_batch(tile.batch_idx) + first_m * a_stride;
  const In* b = args.b.at_batch(tile.batch_idx) + first_n * b_stride;

  fragment<accumulator, kMmaM, kMmaN, kMmaK, Acc> acc;
  fill_fragment(acc, Acc(0.0f));

  int32_t k_left = args.k;
  const auto direct = [&](auto layout_a, auto layout_b) {
    fragment<matrix_a, kMmaM, kMmaN, kMmaK, Element, typename decltype(layout_a)::Layout> fragment_a;
    fragment<matrix_b, kMmaM, kMmaN, kMmaK, Element, typename decltype(layout_b)::Layout> fragment_b;
    for (; k_left >= kMmaK; k_left -= kMmaK) {
      load_matrix_sync(fragment_a, a, static_cast<unsigned>(args.a.ld));
      load_matrix_sync(fragment_b, b, static_cast<unsigned>(args.b.ld));
      round_operand<In>(fragment_a);
      round_operand<In>(fragment_b);
      multiply_accumulate<Config::kSaturate>(acc, fragment_a, fragment_b);
      a += kMmaK * a_stride_k;
      b += kMmaK * b_stride_k;
    }
  };
  if (args.a_aligned && args.b_aligned && first_m + kMmaM <= args.m && first_n + kMmaN <= args.n) {
    const LayoutTag<row_major> row;
    const LayoutTag<col_major> col;
    if (args.a_transposed) {
      args.b_transposed ? direct(col, col) : direct(col, row);
    } else {
      args.b_transposed ? direct(row, col) : direct(row, row);
    }
  }

  const auto gather = [&](In* target, const In* source, int64_t stride, int64_t stride_k, int rows, int64_t rows_left) {
    for (int i = threadIdx.x; i < rows * kMmaK; i += 32) {
      const int row = i / kMmaK, k = i % kMmaK;
      target[i] = row < rows_left && k < k_left ? source[row * stride + k * stride_k] : In(0.0f);
    }
  };
  for (; k_left > 0; k_left -= kMmaK) {
    gather(shared_a, a, a_stride, a_stride_k, kMmaM, args.m - first_m);
    gather(shared_b, b, b_stride, b_stride_k, kMmaN, args.n - first_n);
    __syncwarp();
    fragment<matrix_a, kMmaM, kMmaN, kMmaK, Element, row_major> fragment_a;
    fragment<matrix_b, kMmaM, kMmaN, kMmaK, Element, col_major> fragment_b;
    ptx::wmma_load_shared(fragment_a, shared_a, kMmaK);
    ptx::wmma_load_shared(fragment_b, shared_b, kMmaK);
    __syncwarp();
    round_operand<In>(fragment_a);
    round_operand<In>(fragment_b);
    multiply_accumulate<Config::kSaturate>(acc, fragment_a, fragment_b);
    a += kMmaK * a_stride_k;
    b += kMmaK * b_stride_k;
  }

  using EpilogueAcc = std::conditional_t<std::is_same_v<Acc, __half>, float, Acc>;
  Acc* const staging = reinterpret_cast<Acc*>(shared);
  store_matrix_sync(staging, acc, kMmaN, mem_row_major);
  __syncwarp();
  args.outputs.visit([&](const auto& output) {
    for (int i = threadIdx.x; i < kMmaM * kMmaN; i += 32) {
      const int64_t m_idx = first_m + i / kMmaN, n_idx = first_n + i % kMmaN;
      EpilogueAcc value[1] = {convert<EpilogueAcc>(staging[i])};
      if (m_idx < args.m && n_idx < args.n) output.store(value, tile.batch_idx, m_idx, n_idx);
    }
  });
}

}  // namespace tcgemm::wmma
