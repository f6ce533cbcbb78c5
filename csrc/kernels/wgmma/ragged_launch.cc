// One launch of a grouped product.
#include "kernels/wgmma/ragged_launch.h"

#include "kernels/common/cluster_launch.h"
#include "kernels/common/float_type.h"
#include "kernels/common/function.h"
#include "kernels/wgmma/ragged_params.cuh"

namespace tcgemm::wgmma_family {
namespace {

// What the kernel loads by TMA. An operand that is empty is never read, but must have an address: that of D.
template <typename Epilogue>
Status encode_operand_maps(RaggedParams<Epilogue>* params, const RaggedCall& call) {
  const Geometry& geometry = call.geometry;
  const int tile_m = geometry.shape.tile_m, tile_k = geometry.tile_k();
  const RaggedProblem& p = *call.problem;
  const void* const a = p.a_elements() == 0 ? call.buffers.d : call.buffers.a;
  const void* const b = p.b_elements() == 0 ? call.buffers.d : call.buffers.b;
  Params<Epilogue>& gemm = params->gemm;
  if (!p.is_rows()) {
    const int64_t lda = p.tokens_last ? p.k : p.m, ldb = p.tokens_last ? p.k : p.n;
    Status s = encode_operand_map(&gemm.a_map, {a, p.in, lda, 0, 0}, geometry.a, {p.m, p.k, 1, 1}, geometry.a_box());
    if (!s.is_ok()) return s;
    return encode_operand_map(&gemm.b_map, {b, p.in, ldb, 0, 0}, geometry.b, {p.n, p.k, 1, 1}, geometry.b_box());
  }
  // (column, k, which of a gated product's two matrices, group)
  const AlignedOperand weights{b, p.in, p.b_transposed ? p.k : p.b_columns(), p.b_columns() * p.k,
                               p.epilogue.gated ? p.up_offset() : 0};
  const OperandExtents extents{p.n, p.k, p.epilogue.gated ? 2 : 1, p.groups};
  const Box weight_box = geometry.a.box(p.epilogue.gated ? 64 : tile_m, tile_k, 1);
  Status s = encode_operand_map(&gemm.a_map, weights, geometry.a, extents, weight_box);
  // Gathered tokens are not loaded through maps.
  const int num_boxes = p.gathered ? 0 : geometry.shape.tile_n / geometry.shape.cluster_m / kBoxStep;
  for (int i = 0; i < num_boxes && s.is_ok(); ++i) {
    const Box box = geometry.b.box((i + 1) * kBoxStep, tile_k, 1);
    s = encode_operand_map(&params->token_boxes[i], {a, p.in, p.k, 0, 0}, geometry.b, {p.m, p.k, 1, 1}, box);
  }
  return s;
}

template <typename Epilogue>
Status launch(const RaggedCall& call) {
  const Geometry& geometry = call.geometry;
  const Shape& shape = geometry.shape;
  const RaggedProblem& p = *call.problem;
  const RaggedBuffers& buffers = call.buffers;
  RaggedParams<Epilogue> params{};
  params.groups = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                   static_cast<int32_t>(p.groups), static_cast<int32_t>(p.tokens())};
  params.entry = static_cast<int32_t>(call.entry);
  if (p.gathered) params.gather = {buffers.gather, buffers.a, static_cast<int32_t>(p.a_rows)};

  // Of form rows the kernel's product is the swapped one.
  Params<Epilogue>& gemm = params.gemm;
  gemm.m = static_cast<int32_t>(shape.swapped ? p.n : p.m);
  gemm.n = static_cast<int32_t>(shape.swapped ? p.m : p.n);
  gemm.k = static_cast<int32_t>(p.k);
  gemm.a_scales = strided(call.a_scales, p.k);
  gemm.b_scales = strided(call.b_scales, p.k);
  gemm.out_type = float_type(p.out);
  gemm.d = buffers.d;
  gemm.ldd = p.n;
  if (Status s = encode_operand_maps(&params, call); !s.is_ok()) return s;
  const OutputMatrices d{gemm.d, gemm.out_type, shape.swapped ? 1 : p.groups, p.m, p.n, gemm.ldd};
  gemm.store_with_tma = d.is_stored_by_tma();
  if (gemm.store_with_tma) {
    const StoreBox box = StoreBox::make(shape.swapped, shape.tile_n, d.element_bytes());
    if (Status s = encode_output_map(&gemm.d_map, d, box); !s.is_ok()) return s;
  }

  const int64_t tile_columns = p.epilogue.gated ? shape.tile_m / 2 : shape.tile_m;  // of D, where the weights are A
  if constexpr (Epilogue::kIsFunction) gemm.epilogue.values = make_function(p, *call.all_buffers);

  // At most so many tiles: how many there are is known on the device only.
  const int64_t num_tiles = shape.swapped
                                ? max_ragged_tiles(p, shape.tile_n * shape.cluster_n, tile_columns * shape.cluster_m)
                                : max_ragged_tiles(p, shape.tile_m * shape.cluster_m, shape.tile_n);
  return launch_clusters(*call.kernel, shape.cluster_size(), shape.threads(), ring_offset(geometry) + kRingBytes,
                         params, num_tiles, INT32_MAX, call.stream, "wgmma grouped kernel");
}

}  // namespace

Status launch_ragged(const RaggedCall& call) {
  if (!call.problem->epilogue.function.is_none()) return launch<FunctionArguments>(call);
  return launch<Bare>(call);
}

}  // namespace tcgemm::wgmma_family
