// Adds the partial products of split K in a fixed order and runs the epilogue once.
#include <algorithm>

#include "core/cuda_status.h"
#include "epilogue/epilogue.cuh"
#include "kernels/wgmma/launch.h"
#include "ptx/cluster.cuh"
#include "tile/gemm_args.h"

namespace tcgemm::wgmma_family {
namespace {

constexpr int kThreads = 256;

template <typename Out, int kCount>
__global__ void __launch_bounds__(kThreads) reduce(const float* partials, Out* d, int64_t num_elements, int num_splits,
                                                   const __grid_constant__ epilogue::AlphaBetaC<float, Out> epilogue) {
  struct alignas(kCount * sizeof(float)) In {
    float values[kCount];
  };
  struct alignas(kCount * sizeof(Out)) Pack {
    Out values[kCount];
  };
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (index >= num_elements) return;
  float acc[kCount] = {};
#pragma unroll 8
  for (int split = 0; split < num_splits; ++split) {
    const In in = *reinterpret_cast<const In*>(partials + split * num_elements + index);
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] += in.values[i];
  }
  // D is packed, so a flat index is a position in a matrix of one row.
  epilogue(acc, 0, 0, index);
  Pack pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.values[i] = convert<Out>(acc[i]);
  *reinterpret_cast<Pack*>(d + index) = pack;
}

template <typename Out>
Status launch_typed(const float* partials, int64_t num_elements, const Call& call) {
  const epilogue::AlphaBetaC<float, Out> epilogue{call.alpha, call.beta, static_cast<const Out*>(call.c), 1,
                                                  num_elements};
  const auto launch = [&](auto kernel, int count) {
    cudaLaunchAttribute attribute = programmatic_launch();
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>((num_elements / count + kThreads - 1) / kThreads));
    launch.blockDim = dim3(kThreads);
    launch.stream = call.stream;
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    return cuda_status(cudaLaunchKernelEx(&launch, kernel, partials, static_cast<Out*>(call.d), num_elements,
                                          static_cast<int>(call.num_splits), epilogue),
                       "split reduction kernel");
  };
  if (num_elements % 4 == 0 && is_aligned(call.d, 16)) return launch(reduce<Out, 4>, 4);
  return launch(reduce<Out, 1>, 1);
}

}  // namespace

Status launch_split_reduction(const float* partials, int64_t num_elements, const Call& call) {
  switch (call.out_type) {
    case FloatType::kF16: return launch_typed<__half>(partials, num_elements, call);
    case FloatType::kBF16: return launch_typed<__nv_bfloat16>(partials, num_elements, call);
    case FloatType::kF32: return launch_typed<float>(partials, num_elements, call);
  }
  return Status::internal("unknown output type");
}

}  // namespace tcgemm::wgmma_family
