#include "kernels/wmma/launch.h"

#include <algorithm>

#include "epilogue/epilogue.cuh"
#include "kernels/common/gemm_args.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/wmma/config.h"
#include "kernels/wmma/instance.h"
#include "kernels/wmma/shared_layout.cuh"

namespace tcgemm::wmma {
namespace {

// Float16, bfloat16 or float32: the bare product. What becomes of it is a function.
using AnyFloat = FloatOutputs<epilogue::Identity, float>;
template <typename Acc>
using Exact = Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>;

// What a kernel is instantiated with.
template <typename Config_, typename In_, typename Acc_, typename Outputs_>
struct Types {
  using Config = Config_;
  using In = In_;
  using Acc = Acc_;
  using Outputs = Outputs_;
};

template <typename Mma, typename In, typename Acc, typename Outputs, typename Visit>
auto visit_saturating(bool saturates, const Visit& visit) {
  if (saturates) return visit(Types<NaiveConfig<Mma, true>, In, Acc, Outputs>{});
  return visit(Types<NaiveConfig<Mma>, In, Acc, Outputs>{});
}

template <typename Mma, typename Visit>
auto visit_naive_shape(const Problem& p, bool saturates, const Visit& visit) {
  switch (p.a.dtype) {
    case DType::kS8: return visit_saturating<Mma, int8_t, int32_t, Exact<int32_t>>(saturates, visit);
    case DType::kU8: return visit_saturating<Mma, uint8_t, int32_t, Exact<int32_t>>(saturates, visit);
    case DType::kBF16: return visit(Types<NaiveConfig<Mma>, __nv_bfloat16, float, AnyFloat>{});
    default:
      if (p.compute == Compute::kF32) return visit(Types<NaiveConfig<Mma>, __half, float, AnyFloat>{});
      return visit_saturating<Mma, __half, __half, AnyFloat>(saturates, visit);
  }
}

// Calls visit with the types of a kernel of wmma_naive.
template <typename Visit>
auto visit_naive(const Problem& p, const ConfigName& config, const Visit& visit) {
  if (config.shape == "m16n16k16") return visit_naive_shape<M16N16K16>(p, config.saturates, visit);
  if (config.shape == "m32n8k16") return visit_naive_shape<M32N8K16>(p, config.saturates, visit);
  if (config.shape == "m8n32k16") return visit_naive_shape<M8N32K16>(p, config.saturates, visit);
  if (config.shape == "m16n16k8") return visit(Types<NaiveConfig<M16N16K8>, float, float, AnyFloat>{});
  return visit(Types<NaiveConfig<M8N8K4>, double, double, Exact<double>>{});
}

// Operands that lie as their tiles do: a kernel for each layout.
template <typename Mma, typename Tile, typename In, typename Acc, typename Outputs, typename Visit>
auto visit_each_layout(const Problem& p, const Visit& visit) {
  return visit_layouts(
      p, [&](auto ta, auto tb) { return visit(Types<TiledConfig<Mma, Tile, OneLayout<ta, tb>>, In, Acc, Outputs>{}); });
}

// Operands that are turned on their way into shared memory.
template <typename Mma, typename Tile, typename In, typename Acc, typename Outputs, typename Visit>
auto visit_any_layout(bool saturates, const Visit& visit) {
  if (saturates) return visit(Types<TiledConfig<Mma, Tile, AnyLayout, true>, In, Acc, Outputs>{});
  return visit(Types<TiledConfig<Mma, Tile, AnyLayout, false>, In, Acc, Outputs>{});
}

// ldmatrix cannot transpose 8-bit elements, so K is contiguous in shared memory in any layout.
template <typename Mma, typename Visit>
auto visit_8bit(const Problem& p, bool saturates, const Visit& visit) {
  if (p.a.dtype == DType::kS8) {
    return visit_any_layout<Mma, Tile128x128x64, int8_t, int32_t, Exact<int32_t>>(saturates, visit);
  }
  return visit_any_layout<Mma, Tile128x128x64, uint8_t, int32_t, Exact<int32_t>>(saturates, visit);
}

// The oblong shapes, and float16 accumulators that stay finite.
template <typename Mma, typename Visit>
auto visit_oblong(const Problem& p, bool saturates, const Visit& visit) {
  if (!saturates && p.a.dtype == DType::kBF16) {
    return visit_any_layout<Mma, Tile128x128x32, __nv_bfloat16, float, AnyFloat>(false, visit);
  }
  if (!saturates && p.compute == Compute::kF32) {
    return visit_any_layout<Mma, Tile128x128x32, __half, float, AnyFloat>(false, visit);
  }
  return visit_any_layout<Mma, Tile128x128x32, __half, __half, AnyFloat>(saturates, visit);
}

template <typename In, typename Visit>
auto visit_square(const Problem& p, const ConfigName& config, const Visit& visit) {
  if (config.tile == "64x64x32") return visit_each_layout<M16N16K16, Tile64x64x32, In, float, AnyFloat>(p, visit);
  return visit_each_layout<M16N16K16, Tile128x128x32, In, float, AnyFloat>(p, visit);
}

// Calls visit with the types of a kernel of wmma_tiled.
template <typename Visit>
auto visit_tiled(const Problem& p, const ConfigName& config, const Visit& visit) {
  switch (p.a.dtype) {
    case DType::kF64: return visit_each_layout<M8N8K4, Tile64x128x16, double, double, Exact<double>>(p, visit);
    case DType::kF32: return visit_each_layout<M16N16K8, Tile128x128x16, float, float, AnyFloat>(p, visit);
    case DType::kS8:
    case DType::kU8:
      if (config.shape == "m16n16k16") return visit_8bit<M16N16K16>(p, config.saturates, visit);
      if (config.shape == "m32n8k16") return visit_8bit<M32N8K16>(p, config.saturates, visit);
      return visit_8bit<M8N32K16>(p, config.saturates, visit);
    default:
      if (config.shape == "m32n8k16") return visit_oblong<M32N8K16>(p, config.saturates, visit);
      if (config.shape == "m8n32k16") return visit_oblong<M8N32K16>(p, config.saturates, visit);
      if (config.saturates) return visit_oblong<M16N16K16>(p, true, visit);
      if (p.compute == Compute::kF16) {
        return visit_each_layout<M16N16K16, Tile128x128x32, __half, __half, AnyFloat>(p, visit);
      }
      return p.a.dtype == DType::kBF16 ? visit_square<__nv_bfloat16>(p, config, visit)
                                       : visit_square<__half>(p, config, visit);
  }
}

// "<config>, <elements>, <accumulators>, <outputs>"
template <typename X>
std::string arguments_text(const std::string& outputs) {
  return text_of(typename X::Config{}) + ", " + ElementType<typename X::In>::kText + ", " +
         ElementType<typename X::Acc>::kText + ", " + outputs;
}

template <typename X>
std::string bare_text(X) {
  return arguments_text<X>(text_of(static_cast<const typename X::Outputs*>(nullptr)));
}

// What a direct load_matrix_sync asks of rows that hold `elements` of a tile, see naive_kernel.cuh.
template <typename In>
constexpr int64_t direct_bytes(int elements) {
  return std::clamp<int64_t>(elements * sizeof(In), 16, 32);
}

template <typename X, typename Outputs>
Status launch_tiled_with(const Problem& p, const Buffers& buffers, const Kernel& kernel, cudaStream_t stream) {
  using Config = typename X::Config;
  using Shared = TiledShared<Config, typename X::In, typename X::Acc>;
  const auto args = make_gemm_args<typename X::In, Outputs>(p, buffers, Config::kTileM, Config::kTileN, 16, 16);
  return launch_blocks("wmma_tiled", kernel, args.grid.num_tiles(), Shared::kThreads, Shared::kBytes, stream, args);
}

}  // namespace

KernelSource naive_source(const Problem& p, const ConfigName& config) {
  const std::string arguments = visit_naive(p, config, [](auto x) { return bare_text(x); });
  return {"kernels/wmma/naive_kernel.cuh", "tcgemm::wmma::naive_kernel<" + arguments + ">", {}};
}

Status launch_naive(const Problem& p, const Buffers& buffers, const ConfigName& config, const Kernel& kernel,
                    cudaStream_t stream) {
  return visit_naive(p, config, [&](auto x) {
    using X = decltype(x);
    using Config = typename X::Config;
    using In = typename X::In;
    auto args = make_gemm_args<In, typename X::Outputs>(
        p, buffers, Config::kMmaM, Config::kMmaN, direct_bytes<In>(p.a.transposed ? Config::kMmaM : Config::kMmaK),
        direct_bytes<In>(p.b.transposed ? Config::kMmaK : Config::kMmaN));
    // load_matrix_sync may compute offsets inside a tile in 32 bits.
    constexpr int64_t kMaxLd = (int64_t{1} << 31) / (32 * sizeof(In));
    args.a_aligned = args.a_aligned && p.a.ld < kMaxLd;
    args.b_aligned = args.b_aligned && p.b.ld < kMaxLd;
    return launch_blocks("wmma_naive", kernel, args.grid.num_tiles(), 32, 0, stream, args);
  });
}

KernelSource tiled_source(const Problem& p, const ConfigName& config, bool runs_function) {
  const std::string arguments = visit_tiled(p, config, [&](auto x) {
    if (!runs_function) return bare_text(x);
    return arguments_text<decltype(x)>("tcgemm::epilogue::Function<tcgemm::elementwise::" + p.epilogue.function.name +
                                       ">");
  });
  return {"kernels/wmma/tiled_kernel.cuh", "tcgemm::wmma::tiled_kernel<" + arguments + ">", {}};
}

Status launch_tiled(const Problem& p, const Buffers& buffers, const ConfigName& config, bool runs_function,
                    const Kernel& kernel, cudaStream_t stream) {
  return visit_tiled(p, config, [&](auto x) {
    using X = decltype(x);
    if (runs_function) return launch_tiled_with<X, epilogue::FunctionParams>(p, buffers, kernel, stream);
    return launch_tiled_with<X, typename X::Outputs>(p, buffers, kernel, stream);
  });
}

}  // namespace tcgemm::wmma
