#include "kernels/mma_sync/ragged_launch.cuh"

namespace tcgemm::mma {

template Status launch_ragged<F16F32>(const RaggedProblem&, const RaggedBuffers&, cudaStream_t);
template Status launch_ragged<BF16F32>(const RaggedProblem&, const RaggedBuffers&, cudaStream_t);
template Status launch_ragged<TF32F32>(const RaggedProblem&, const RaggedBuffers&, cudaStream_t);

}  // namespace tcgemm::mma
