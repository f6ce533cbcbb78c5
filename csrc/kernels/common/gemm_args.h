// Host side of gemm_args.cuh and output.cuh: fills kernel arguments from a problem.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "kernels/common/alignment.h"
#include "kernels/common/function.h"
#include "tile/gemm_args.cuh"

namespace tcgemm {

template <typename Epilogue>
struct MakeEpilogue;
template <typename Acc, typename Out>
struct MakeEpilogue<epilogue::Identity<Acc, Out>> {
  static epilogue::Identity<Acc, Out> make(const Problem&, const Buffers&) { return {}; }
};
template <typename Acc, typename Out>
struct MakeEpilogue<epilogue::AlphaBetaC<Acc, Out>> {
  static epilogue::AlphaBetaC<Acc, Out> make(const Problem& p, const Buffers& buffers) {
    using Real = real_of_t<Acc>;
    return {static_cast<Real>(p.alpha), static_cast<Real>(p.beta), static_cast<const Out*>(buffers.c), p.m, p.n};
  }
};

template <typename Outputs>
struct MakeOutputs;
template <typename Out, typename Epilogue>
struct MakeOutputs<Output<Out, Epilogue>> {
  static Output<Out, Epilogue> make(const Problem& p, const Buffers& buffers) {
    const bool aligned = is_aligned(buffers.d, 16) && p.n * static_cast<int64_t>(sizeof(Out)) % 16 == 0;
    return {static_cast<Out*>(buffers.d), p.m, p.n, aligned, MakeEpilogue<Epilogue>::make(p, buffers)};
  }
};
template <template <typename, typename> class Epilogue, typename Acc>
struct MakeOutputs<FloatOutputs<Epilogue, Acc>> {
  static FloatOutputs<Epilogue, Acc> make(const Problem& p, const Buffers& buffers) {
    FloatOutputs<Epilogue, Acc> outputs{};
    const auto fill = [&](auto& output) {
      output = MakeOutputs<std::remove_reference_t<decltype(output)>>::make(p, buffers);
    };
    if (p.out == DType::kF16) {
      outputs.type = FloatType::kF16;
      fill(outputs.f16);
    } else if (p.out == DType::kBF16) {
      outputs.type = FloatType::kBF16;
      fill(outputs.bf16);
    } else {
      outputs.type = FloatType::kF32;
      fill(outputs.f32);
    }
    return outputs;
  }
};

template <>
struct MakeOutputs<epilogue::FunctionParams> {
  static epilogue::FunctionParams make(const Problem& p, const Buffers& buffers) { return make_function(p, buffers); }
};

// `vector_bytes`: what the kernel's widest access to a row of a or b needs.
template <typename In, typename Outputs>
GemmArgs<In, Outputs> make_gemm_args(const Problem& p, const Buffers& buffers, int64_t tile_m, int64_t tile_n,
                                     int64_t a_vector_bytes, int64_t b_vector_bytes) {
  const auto matrix = [&](const void* data, const Operand& operand) {
    return BatchedMatrix<In>{static_cast<const In*>(data), operand.ld, operand.batch_outer_stride,
                             operand.batch_inner_stride, p.batch_inner};
  };
  return {matrix(buffers.a, p.a),
          matrix(buffers.b, p.b),
          p.a.transposed,
          p.b.transposed,
          rows_aligned(buffers.a, p.a, a_vector_bytes),
          rows_aligned(buffers.b, p.b, b_vector_bytes),
          static_cast<int32_t>(p.m),
          static_cast<int32_t>(p.n),
          static_cast<int32_t>(p.k),
          TileGrid::make(p.batch, p.m, p.n, tile_m, tile_n),
          MakeOutputs<Outputs>::make(p, buffers)};
}

}  // namespace tcgemm
