// One launch of a grouped product.
#include <algorithm>

#include "kernels/common/alignment.h"
#include "kernels/common/cluster_launch.h"
#include "kernels/common/fused.h"
#include "kernels/wgmma/ragged_launch.h"
#include "kernels/wgmma/ragged_params.cuh"

namespace tcgemm::wgmma_family {
namespace {

// A matrix of `rows` rows, or `groups` of them one after another. One that is empty is never read, but
// must have an address: that of D.
struct RaggedOperand {
  const void* data;
  int64_t contiguous, rows, groups;
};

Status encode_ragged_map(CUtensorMap* map, const RaggedCall& call, const RaggedOperand& x, Box box) {
  Call extents{};
  extents.batch = extents.batch_inner = std::max<int64_t>(x.groups, 1);
  const bool is_empty = x.contiguous == 0 || x.rows == 0 || x.groups == 0;
  const AlignedOperand operand{is_empty ? call.buffers.d : x.data, call.problem->in, x.contiguous, 0,
                               x.contiguous * x.rows};
  return encode_operand_map(map, extents, operand, {x.contiguous, x.rows}, box);
}

// The weights of a kernel with an epilogue: (column, k, which of a gated product's two matrices, group).
Status encode_weights_map(CUtensorMap* map, const RaggedCall& call, Box box) {
  const RaggedProblem& p = *call.problem;
  const int64_t halves = p.epilogue.gated ? 2 : 1;
  Call extents{};
  extents.batch_inner = halves;
  extents.batch = halves * std::max<int64_t>(p.groups, 1);
  const bool is_empty = p.n == 0 || p.k == 0 || p.groups == 0;
  const AlignedOperand operand{is_empty ? call.buffers.d : call.buffers.b, p.in, halves * p.n, halves * p.n * p.k, p.n};
  return encode_operand_map(map, extents, operand, {p.n, p.k}, box);
}

template <typename Epilogue>
Status launch(const RaggedCall& call) {
  const Geometry& geometry = call.geometry;
  const Shape& shape = geometry.shape;
  const bool is_rows = shape.swapped;
  const RaggedProblem& p = *call.problem;
  const RaggedBuffers& buffers = call.buffers;
  RaggedParams<Epilogue> params{};
  Params<Epilogue>& gemm = params.gemm;
  // Of form rows the kernel's product is the swapped one.
  gemm.m = static_cast<int32_t>(is_rows ? p.n : p.m);
  gemm.n = static_cast<int32_t>(is_rows ? p.m : p.n);
  gemm.k = static_cast<int32_t>(p.k);
  gemm.batch = gemm.batch_inner = gemm.num_splits = 1;
  gemm.out_type = p.out == DType::kF16 ? FloatType::kF16 : p.out == DType::kBF16 ? FloatType::kBF16 : FloatType::kF32;
  gemm.d = buffers.d;
  gemm.ldd = p.n;
  params.groups = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                   static_cast<int32_t>(p.groups), static_cast<int32_t>(p.tokens())};

  Call out{};
  out.geometry = geometry;
  out.batch = is_rows ? 1 : p.groups;
  out.num_splits = 1;
  out.m = gemm.m;
  out.n = gemm.n;
  out.out_type = gemm.out_type;
  out.d = buffers.d;
  const int64_t out_bytes = dtype_bytes(p.out);
  gemm.store_with_tma = is_aligned(buffers.d, 16) && gemm.ldd * out_bytes % 16 == 0;
  if (gemm.store_with_tma) {
    if (Status s = encode_output_map(&gemm.d_map, out, shape.tile_n); !s.is_ok()) return s;
  }

  int64_t tile_columns = shape.tile_m;  // of D, where the weights are A
  if (is_rows) {
    const bool is_k_major = geometry.a.is_k_major();
    const RaggedOperand weights{buffers.b, is_k_major ? p.k : p.n, is_k_major ? p.n : p.k, p.groups};
    const RaggedOperand tokens{buffers.a, p.k, p.m, 1};
    const Box box = geometry.a.box(shape.tile_m, geometry.tile_k(), 1);
    Status status = Status::ok();
    if constexpr (Epilogue::kFused) {
      RaggedFused& fused = gemm.epilogue;
      fused.activation = p.epilogue.activation;
      fused.gated = p.epilogue.gated;
      fused.bias_type = epilogue::float_type(p.epilogue.bias_dtype);
      fused.bias = p.epilogue.bias == Bias::kNone ? nullptr : buffers.bias;
      fused.gather = p.gathered ? buffers.gather : nullptr;
      fused.rows = buffers.a;
      fused.num_rows = static_cast<int32_t>(p.a_rows);
      tile_columns = fused.tile_columns(shape.tile_m);
      status = encode_weights_map(&gemm.a_map, call, box);
    } else {
      status = encode_ragged_map(&gemm.a_map, call, weights, box);
    }
    if (!status.is_ok()) return status;
    // Gathered tokens are not loaded through maps, and may have no address where there are none.
    const int num_boxes = p.gathered ? 0 : shape.tile_n / shape.cluster_m / kBoxStep;
    for (int i = 0; i < num_boxes; ++i) {
      const Box tokens_box = geometry.b.box((i + 1) * kBoxStep, geometry.tile_k(), 1);
      if (Status s = encode_ragged_map(&params.token_boxes[i], call, tokens, tokens_box); !s.is_ok()) return s;
    }
  } else {
    Status s = encode_ragged_map(&gemm.a_map, call, {buffers.a, p.m, p.k, 1}, geometry.a_box());
    if (s.is_ok()) s = encode_ragged_map(&gemm.b_map, call, {buffers.b, p.n, p.k, 1}, geometry.b_box());
    if (!s.is_ok()) return s;
  }

  // At most so many tiles: how many there are is known on the device only.
  const int64_t num_tiles = is_rows
                                ? max_ragged_tiles(p, shape.tile_n * shape.cluster_n, tile_columns * shape.cluster_m)
                                : max_ragged_tiles(p, shape.tile_m * shape.cluster_m, shape.tile_n);
  return launch_clusters(*call.kernel, shape.cluster_size(), shape.threads(), ring_offset(geometry) + kRingBytes,
                         params, num_tiles, INT32_MAX, call.stream, "wgmma grouped kernel");
}

}  // namespace

Status launch_ragged(const RaggedCall& call) {
  return call.has_epilogue ? launch<RaggedFused>(call) : launch<Bare>(call);
}

}  // namespace tcgemm::wgmma_family
