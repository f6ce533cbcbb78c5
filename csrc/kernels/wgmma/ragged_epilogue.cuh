// The epilogues of grouped products of form rows, between the accumulators of the swapped product and D:
// a bias of each group, an activation, and gating, in registers on 64 columns of D at a time.
//
// A gated product's tile holds weights of both matrices, 64 columns of the one above the same 64 of the
// other: a warpgroup's first accumulators are the gate's and its second ones those of Z_up.
#pragma once

#include <cstdint>

#include "epilogue/fused.cuh"
#include "kernels/wgmma/ragged_store.cuh"

namespace tcgemm::wgmma_family {

// What becomes of the sums of 64 columns of D from `column` on, times a tile's tokens. A thread's value number
// 4 * j + 2 * h + i is that of column warp * 16 + h * 8 + lane / 4 and token 8 * j + lane % 4 * 2 + i. `up`: the
// sums of a gated product's second matrix.
template <int kValues>
__device__ __forceinline__ void apply_epilogue(float (&z)[kValues], float (&up)[kValues], const Params<Fused>& params,
                                               int32_t column, const RaggedWork& work) {
  const epilogue::Fused& f = params.epilogue.values;
  // Rows of no group stay 0.
  if (work.tokens.group < 0) return;
  if (f.bias != nullptr) {
    const int thread_idx = ptx::tid_x() % 128, own = column + thread_idx / 32 * 16 + thread_idx % 32 / 4;
    const auto add_bias = [&](float (&x)[kValues], int32_t first) {
      const int64_t place = work.tokens.group * f.bias_batch_stride + first + own;
      float values[2][1];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        epilogue::load_floats(values[h], f.bias, f.bias_type, place + 8 * h, own + 8 * h < params.m, false);
      }
#pragma unroll
      for (int v = 0; v < kValues; ++v) x[v] += values[v / 2 % 2][0];
    };
    add_bias(z, 0);
    if (f.gated) add_bias(up, params.m);
  }
  // As many at a time as keep the units busy.
  constexpr int kPart = 16, kPartTokens = kPart * 2;
  activation::visit(f.activation, [&](auto activation) {
#pragma unroll
    for (int first = 0; first < kValues; first += kPart) {
      if (first / kPart * kPartTokens >= work.num_tokens()) break;
#pragma unroll
      for (int v = 0; v < kPart; ++v) z[first + v] = activation.value(z[first + v]);
    }
  });
  if (f.gated) epilogue::multiply(z, up);
}

// All of a warpgroup's accumulators, the first of which is that of tile row `first_row`.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void store_fused_tokens(float (&acc)[kBlocksM][Config::kTileN / 2],
                                                   const Params<Fused>& params, uint32_t buffers, int& buffer_idx,
                                                   int32_t first_row, const RaggedWork& work, uint32_t barrier_id) {
  static_assert(kBlocksM == 2, "a gated product's two matrices");
  const bool gated = params.epilogue.values.gated;
  int32_t column = work.m_idx + (gated ? first_row / 2 : first_row);
  // In one place in the code, to which the second block's values move: registers have no index that changes.
#pragma unroll 1
  for (int block = 0; block < (gated ? 1 : kBlocksM); ++block, column += 64) {
    apply_epilogue(acc[0], acc[1], params, column, work);
    store_tokens<Config>(acc[0], params, buffers, buffer_idx, column, work, barrier_id);
#pragma unroll
    for (int v = 0; v < Config::kTileN / 2; ++v) acc[0][v] = acc[1][v];
  }
}

}  // namespace tcgemm::wgmma_family
