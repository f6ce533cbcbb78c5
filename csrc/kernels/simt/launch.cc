#include "kernels/simt/launch.h"

#include <string>

#include "epilogue/epilogue.cuh"
#include "kernels/common/gemm_args.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/type_text.h"
#include "kernels/simt/config.h"

namespace tcgemm::simt {
namespace {

bool is_identity(const Problem& p) { return p.alpha == 1.0 && p.beta == 0.0; }

// The types that kernels are instantiated with.
template <typename In_, typename Acc_, typename Outputs_>
struct Types {
  using In = In_;
  using Acc = Acc_;
  using Outputs = Outputs_;
};
template <typename In, typename Acc>
using Exact = Types<In, Acc, Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>>;

// Calls visit with those of floating-point sums, of which the bare product has its own.
template <typename In, typename Visit>
auto visit_float(const Problem& p, const Visit& visit) {
  if (is_identity(p)) return visit(Types<In, float, FloatOutputs<epilogue::Identity, float>>{});
  return visit(Types<In, float, FloatOutputs<epilogue::AlphaBetaC, float>>{});
}

template <typename Visit>
auto visit_naive(const Problem& p, const Visit& visit) {
  switch (p.a.dtype) {
    case DType::kF16: return visit_float<__half>(p, visit);
    case DType::kBF16: return visit_float<__nv_bfloat16>(p, visit);
    case DType::kF64: return visit(Exact<double, double>{});
    case DType::kS8: return visit(Exact<int8_t, int32_t>{});
    case DType::kU8: return visit(Exact<uint8_t, int32_t>{});
    case DType::kC64: return visit(Exact<Complex<float>, Complex<float>>{});
    case DType::kC128: return visit(Exact<Complex<double>, Complex<double>>{});
    default: return visit_float<float>(p, visit);
  }
}

// A tile and its name.
template <typename Tile_>
struct Named {
  using Tile = Tile_;
  const char* name;
};

// Calls visit(types, named tile).
template <typename Visit>
auto visit_tiled(const Problem& p, std::string_view config, const Visit& visit) {
  const Named<Tile64x64x8> small{"Tile64x64x8"};
  switch (p.a.dtype) {
    case DType::kC128:
      return visit(Exact<Complex<double>, Complex<double>>{}, Named<Tile64x64x8Wide>{"Tile64x64x8Wide"});
    case DType::kC64: return visit(Exact<Complex<float>, Complex<float>>{}, small);
    case DType::kF64:
      if (is_identity(p))
        return visit(Types<double, double, Output<double, epilogue::Identity<double, double>>>{}, small);
      return visit(Exact<double, double>{}, small);
    default:
      return visit_float<float>(p, [&](auto types) {
        return config == "128x64x16" ? visit(types, Named<Tile128x64x16>{"Tile128x64x16"})
                                     : visit(types, Named<Tile128x128x16>{"Tile128x128x16"});
      });
  }
}

template <typename Outputs>
std::string outputs_text() {
  return text_of(static_cast<const Outputs*>(nullptr));
}

}  // namespace

KernelSource naive_source(const Problem& p) {
  const std::string types = visit_naive(p, [](auto x) {
    return std::string(ElementType<typename decltype(x)::In>::kText) + ", " +
           ElementType<typename decltype(x)::Acc>::kText + ", " + outputs_text<typename decltype(x)::Outputs>();
  });
  return {"kernels/simt/naive_kernel.cuh", "tcgemm::simt::naive_kernel<" + types + ">", {}};
}

Status launch_naive(const Problem& p, const Buffers& buffers, const Kernel& kernel, cudaStream_t stream) {
  return visit_naive(p, [&](auto x) {
    using X = decltype(x);
    const auto args = make_gemm_args<typename X::In, typename X::Outputs>(p, buffers, NaiveConfig::kTileM,
                                                                          NaiveConfig::kTileN, 16, 16);
    return launch_blocks("simt_naive", kernel, args.grid.num_tiles(), NaiveConfig::kThreads, 0, stream, args);
  });
}

KernelSource tiled_source(const Problem& p, std::string_view config) {
  const std::string arguments = visit_tiled(p, config, [&](auto x, auto tile) {
    const auto flag = [](bool value) { return value ? "true" : "false"; };
    return std::string("tcgemm::simt::TiledConfig<tcgemm::simt::") + tile.name + ", " + flag(p.a.transposed) + ", " +
           flag(p.b.transposed) + ">, " + ElementType<typename decltype(x)::In>::kText + ", " +
           outputs_text<typename decltype(x)::Outputs>();
  });
  return {"kernels/simt/tiled_kernel.cuh", "tcgemm::simt::tiled_kernel<" + arguments + ">", {}};
}

Status launch_tiled(const Problem& p, const Buffers& buffers, std::string_view config, const Kernel& kernel,
                    cudaStream_t stream) {
  return visit_tiled(p, config, [&](auto x, auto tile) {
    using X = decltype(x);
    using Tile = typename decltype(tile)::Tile;
    const auto args =
        make_gemm_args<typename X::In, typename X::Outputs>(p, buffers, Tile::kTileM, Tile::kTileN, 16, 16);
    return launch_blocks("simt_tiled", kernel, args.grid.num_tiles(), Tile::kThreads, 0, stream, args);
  });
}

}  // namespace tcgemm::simt
