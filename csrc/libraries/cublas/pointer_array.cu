// The addresses are written by a kernel, not copied from the host: a graph replays its copies, and
// the host's memory would be gone by then.
#include <algorithm>

#include "core/cuda_status.h"
#include "libraries/cublas/pointer_array.h"

namespace tcgemm::cublas {
namespace {

// As many as one launch takes by value.
constexpr int kMaxBases = 128;
struct Bases {
  const char* address[kMaxBases];
};

__global__ void fill_pointers_kernel(const __grid_constant__ Bases bases, int64_t stride_bytes, int64_t batch,
                                     int64_t count, const void** pointers) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    pointers[i] = bases.address[i / batch] + i % batch * stride_bytes;
  }
}

}  // namespace

Status fill_pointers(const std::vector<const void*>& bases, int64_t stride_bytes, int64_t batch, const void** pointers,
                     cudaStream_t stream) {
  constexpr int kThreads = 256;
  for (size_t first = 0; first < bases.size(); first += kMaxBases) {
    const auto num_bases = static_cast<int64_t>(std::min<size_t>(kMaxBases, bases.size() - first));
    Bases part{};
    for (int64_t i = 0; i < num_bases; ++i) part.address[i] = static_cast<const char*>(bases[first + i]);
    const int64_t count = num_bases * batch;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(1024, (count + kThreads - 1) / kThreads));
    fill_pointers_kernel<<<blocks, kThreads, 0, stream>>>(part, stride_bytes, batch, count,
                                                          pointers + static_cast<int64_t>(first) * batch);
    if (Status s = launch_status("fill_pointers_kernel"); !s.is_ok()) return s;
  }
  return Status::ok();
}

}  // namespace tcgemm::cublas
