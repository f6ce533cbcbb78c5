// What the launchers need of the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "machine.h"
#include "tensor_map.h"

using emulator::Machine;

extern "C" {

// Launchers remember by device how many blocks are resident, so each number of processors is a device.
cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = Machine::get().options.num_sms;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return Machine::get().last_error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }
const char* cudaGetErrorName(cudaError_t) { return "emulation"; }
const char* cudaGetErrorString(cudaError_t) { return Machine::get().last_error.c_str(); }

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveClusters(int* num_clusters, const void*, const cudaLaunchConfig_t* config) {
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) size = config->attrs[i].val.clusterDim.x;
  }
  *num_clusters = std::max(Machine::get().options.num_sms / size, 1);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? reinterpret_cast<void*>(&emulator::encode_tiled) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// What -fsanitize=alignment,bounds calls: where hardware would fault, or a kernel leaves its registers.
struct SourceLocation {
  const char* file;
  unsigned line, column;
};

void __ubsan_handle_type_mismatch_v1(const SourceLocation* where, const void*) {
  emulator::fail(std::string("an access is not aligned at ") + where->file + ":" + std::to_string(where->line));
}

void __ubsan_handle_out_of_bounds(const SourceLocation* where, const void*) {
  emulator::fail(std::string("an index is out of bounds at ") + where->file + ":" + std::to_string(where->line));
}

}  // extern "C"
