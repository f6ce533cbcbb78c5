// For code that may allocate and load kernels while the calling thread captures a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

namespace tcgemm {

// Creating a library's handle, its first query and the first launch of a kernel may allocate and
// load code, which a thread that is capturing a graph is refused in any other mode. None of it
// touches the captured stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace tcgemm
