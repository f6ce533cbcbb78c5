// The epilogues of grouped products of form rows, between the accumulators of the swapped product and D:
// a bias of each group, an activation, and gating. They run in registers on 64 columns of D times 64
// tokens at a time, in rolled loops, so that a kernel holds each of their branches once.
//
// A gated product's tile holds weights of both matrices, 64 columns of the one above the same 64 of the
// other: a warpgroup's first accumulators are the gate's and its second ones those of Z_up.
#pragma once

#include <cstdint>

#include "epilogue/fused.cuh"
#include "kernels/wgmma/ragged_store.cuh"

namespace tcgemm::wgmma_family {

// The epilogue of a kernel that can do all of them, and that may gather its tokens.
struct RaggedFused {
  static constexpr bool kFused = true;

  Activation activation;
  bool gated;
  FloatType bias_type;
  const void* bias;  // (groups, 1 or, gated, 2, columns of D); or null
  // Null, or for each token its row among `num_rows` rows of k at `rows`.
  const int32_t* gather;
  const void* rows;
  int32_t num_rows;

  // Columns of D in a tile.
  template <typename Config>
  __host__ __device__ int32_t tile_columns() const {
    return gated ? Config::kTileM / 2 : Config::kTileM;
  }
};

// 64 columns of D from `column` on, times the tile's tokens from `first_token` on. A thread's value number
// 4 * j + 2 * h + i is that of column warp * 16 + h * 8 + lane / 4 and token 8 * j + lane % 4 * 2 + i.
class TokenFragment {
 public:
  static constexpr int kTokens = 64, kValues = 32;

  __device__ __forceinline__ TokenFragment(const Params<RaggedFused>& params, const RaggedWork& work, int32_t column,
                                           int32_t first_token, uint8_t* buffers, int& buffer_idx, uint32_t barrier_id)
      : params_(params),
        column_(column),
        row_(work.n_idx + first_token),
        tokens_(work.num_tokens() - first_token),
        group_(work.tokens.group),
        buffers_(buffers),
        buffer_idx_(buffer_idx),
        barrier_id_(barrier_id) {}

  // Stores what becomes of the sums. `up`: those of a gated product's second matrix.
  __device__ __forceinline__ void store(float (&z)[kValues], float (&up)[kValues]) const {
    const RaggedFused& f = params_.epilogue;
    // Rows of no group stay 0.
    const bool is_group = group_ >= 0;
    if (is_group && f.bias != nullptr) {
      add_bias(z, 0);
      if (f.gated) add_bias(up, 1);
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (part * kPartTokens >= tokens_) break;
      float values[kPart];
      select(values, z, part);
      if (is_group) {
        epilogue::apply_value(f.activation, values);
        if (f.gated) {
          float factor[kPart];
          select(factor, up, part);
#pragma unroll
          for (int v = 0; v < kPart; ++v) values[v] *= factor[v];
        }
      }
      const bool is_last = (part + 1) * kPartTokens >= tokens_;
      if (params_.out_type == FloatType::kF32) {
        if (part % 2 == 0) begin_box();
        stage_float(values, part % 2);
        if (part % 2 == 1 || is_last) end_box<float>(part / 2 * 32);
      } else {
        if (part == 0) begin_box();
        stage_16bit(values, part);
        if (part == kParts - 1 || is_last) end_box<uint16_t>(0);
      }
    }
  }

 private:
  static constexpr int kPart = 8, kParts = kValues / kPart, kPartTokens = kTokens / kParts;

  static __device__ __forceinline__ int thread_idx() { return ptx::tid_x() % 128; }

  static __device__ __forceinline__ void select(float (&x)[kPart], const float (&y)[kValues], int part) {
#pragma unroll
    for (int v = 0; v < kPart; ++v) {
      const float low = part & 1 ? y[kPart + v] : y[v], high = part & 1 ? y[3 * kPart + v] : y[2 * kPart + v];
      x[v] = part & 2 ? high : low;
    }
  }

  __device__ __forceinline__ void add_bias(float (&z)[kValues], int32_t half) const {
    const RaggedFused& f = params_.epilogue;
    const int64_t first = (int64_t{group_} * (1 + f.gated) + half) * params_.m;
    const int32_t column = column_ + thread_idx() / 32 * 16 + thread_idx() % 32 / 4;
    epilogue::visit(f.bias_type, [&](auto tag) {
      const auto* bias = static_cast<const decltype(tag)*>(f.bias) + first;
      float values[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        values[h] = column + 8 * h < params_.m ? convert<float>(bias[column + 8 * h]) : 0.0f;
      }
#pragma unroll
      for (int v = 0; v < kValues; ++v) z[v] += values[v / 2 % 2];
    });
  }

  __device__ __forceinline__ uint8_t* buffer() const { return buffers_ + buffer_idx_ * 8192; }

  __device__ __forceinline__ void begin_box() const {
    // The store issued two boxes ago, by this same thread, has read the buffer.
    if (thread_idx() == 0) ptx::tma_store_wait_read<1>();
    ptx::named_barrier_sync(barrier_id_, 128);
  }

  // A box of 64 tokens by 64 columns.
  __device__ __forceinline__ void stage_16bit(const float (&values)[kPart], int part) const {
    const int warp = thread_idx() / 32, lane = thread_idx() % 32;
    const int row = part * kPartTokens + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pack(values[2 * i], values[2 * i + 1], params_.out_type);
    ptx::stmatrix_x4_trans(ptx::shared_address(buffer()) + swizzle<128>(row * 128 + column * 2), r[0], r[1], r[2],
                           r[3]);
  }
  // Two boxes of 32 tokens by 32 columns, side by side.
  __device__ __forceinline__ void stage_float(const float (&values)[kPart], int part) const {
    const int along = thread_idx() / 32 * 16 + thread_idx() % 32 / 4, across = thread_idx() % 4 * 2;
    uint8_t* box = buffer() + along / 32 * 4096;
#pragma unroll
    for (int v = 0; v < kPart; ++v) {
      const int row = part * kPartTokens + v / 4 * 8 + across + v % 2, column = along % 32 + v / 2 % 2 * 8;
      *reinterpret_cast<float*>(box + swizzle<128>(row * 128 + column * 4)) = values[v];
    }
  }

  // Stores the staged tokens, which begin `first` after the fragment's.
  template <typename Out>
  __device__ __forceinline__ void end_box(int32_t first) const {
    constexpr int kBoxes = sizeof(Out) / 2, kBoxColumns = 128 / sizeof(Out), kBoxRows = 64 / kBoxes;
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier_id_, 128);
    const bool is_whole = params_.store_with_tma && tokens_ - first >= kBoxRows;
    const int32_t row = row_ + first;
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) {
      const uint8_t* staged = buffer() + box * kBoxRows * 128;
      const int32_t column = column_ + box * kBoxColumns;
      if (!is_whole) {
        copy_rows<Out, 128>(staged, static_cast<Out*>(params_.d) + row * params_.ldd + column, params_.ldd,
                            min(tokens_ - first, kBoxRows), params_.m - column, params_.store_with_tma, thread_idx());
      } else if (thread_idx() == 0) {
        ptx::tma_store_3d(&params_.d_map, staged, column, row, 0);
      }
    }
    // Also without a store: the wait in begin_box counts groups.
    if (thread_idx() == 0) ptx::tma_store_commit();
    buffer_idx_ ^= 1;
  }

  const Params<RaggedFused>& params_;
  const int32_t column_, row_, tokens_, group_;
  uint8_t* const buffers_;
  int& buffer_idx_;
  const uint32_t barrier_id_;
};

// All of a warpgroup's accumulators, the first of which is that of tile row `first_row`.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void store_fused_tokens(float (&acc)[kBlocksM][Config::kTileN / 2],
                                                   const Params<RaggedFused>& params, uint8_t* buffers, int& buffer_idx,
                                                   int32_t first_row, const RaggedWork& work, uint32_t barrier_id) {
  constexpr int kFragment = TokenFragment::kValues, kBlockValues = Config::kTileN / 2;
  constexpr int kValues = kBlocksM * kBlockValues;
  static_assert(kBlocksM == 2 && kBlockValues % kFragment == 0, "a gated product's two matrices, in whole fragments");
  float (&values)[kValues] = reinterpret_cast<float (&)[kValues]>(acc);
  const bool gated = params.epilogue.gated;
  const int32_t column = work.m_idx + (gated ? first_row / 2 : first_row);
#pragma unroll 1
  for (int block = 0; block < (gated ? 1 : kBlocksM); ++block) {
#pragma unroll 1
    for (int32_t token = 0; token < Config::kTileN; token += TokenFragment::kTokens) {
      if (token < work.num_tokens()) {
        TokenFragment(params, work, column + block * 64, token, buffers, buffer_idx, barrier_id)
            .store(reinterpret_cast<float (&)[kFragment]>(values[0]),
                   reinterpret_cast<float (&)[kFragment]>(values[kBlockValues]));
      }
      // The values move down as they are used up: registers have no index that changes.
#pragma unroll
      for (int v = 0; v + kFragment < kValues; ++v) values[v] = values[v + kFragment];
    }
  }
}

}  // namespace tcgemm::wgmma_family
