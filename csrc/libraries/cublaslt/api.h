// The part of cuBLASLt that is used, declared here so that neither its headers nor its library
// are needed to build. Names, values and signatures are those of cublasLt.h and cublas_api.h of
// CUDA 12 and 13, where they agree; descriptors are created by the library and stay opaque,
// since their size differs between the two.
// https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
#pragma once

#include <driver_types.h>
#include <library_types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tcgemm {
class SharedLibrary;
}

namespace tcgemm::lt {

enum cublasStatus_t : int { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_SUPPORTED = 15 };

enum cublasOperation_t : int32_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };

enum cublasComputeType_t : int {
  CUBLAS_COMPUTE_16F = 64,
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
  CUBLAS_COMPUTE_64F = 70,
  CUBLAS_COMPUTE_32I = 72,
};

enum cublasLtMatrixLayoutAttribute_t : int {
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,           // int32_t
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,  // int64_t, elements
};

enum cublasLtMatmulDescAttributes_t : int {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,                 // int32_t
  CUBLASLT_MATMUL_DESC_TRANSB = 4,                 // int32_t
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,               // uint32_t
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,           // const void*, an element for each row of the result
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,  // void*
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,       // int64_t, elements
};

// "AUX": the activation's argument is stored, or for DGELU read, as a matrix of the result's type.
enum cublasLtEpilogue_t : uint32_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_RELU = 2,
  CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_EPILOGUE_RELU_BIAS = 6,
  CUBLASLT_EPILOGUE_GELU = 32,
  CUBLASLT_EPILOGUE_GELU_BIAS = 36,
  CUBLASLT_EPILOGUE_GELU_AUX = 160,
  CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
  CUBLASLT_EPILOGUE_DGELU = 192,
};

enum cublasLtMatmulPreferenceAttributes_t : int {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,    // uint64_t
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,  // uint32_t
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,  // uint32_t, as the next three
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

enum cublasLtReductionScheme_t : uint32_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };

struct cublasLtContext;
struct cublasLtMatmulDesc;
struct cublasLtMatrixLayout;
struct cublasLtMatmulPreference;
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDesc*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayout*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreference*;

// Plain data, without pointers: the library documents that it may be copied and stored.
struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};

// The functions of the loaded library (libraries/shared_library.h).
struct Api {
  static constexpr std::array kSonames{"libcublasLt.so.13", "libcublasLt.so.12"};
  std::string resolve_all(const SharedLibrary& library);

  size_t (*cublasLtGetVersion)();
  const char* (*cublasLtGetStatusName)(cublasStatus_t status);
  cublasStatus_t (*cublasLtCreate)(cublasLtHandle_t* handle);
  cublasStatus_t (*cublasLtMatmulDescCreate)(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute_type,
                                             cudaDataType_t scale_type);
  cublasStatus_t (*cublasLtMatmulDescSetAttribute)(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                                   const void* value, size_t bytes);
  cublasStatus_t (*cublasLtMatmulDescDestroy)(cublasLtMatmulDesc_t desc);
  cublasStatus_t (*cublasLtMatrixLayoutCreate)(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                               uint64_t columns, int64_t ld);
  cublasStatus_t (*cublasLtMatrixLayoutSetAttribute)(cublasLtMatrixLayout_t layout,
                                                     cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                     size_t bytes);
  cublasStatus_t (*cublasLtMatrixLayoutDestroy)(cublasLtMatrixLayout_t layout);
  cublasStatus_t (*cublasLtMatmulPreferenceCreate)(cublasLtMatmulPreference_t* preference);
  cublasStatus_t (*cublasLtMatmulPreferenceSetAttribute)(cublasLtMatmulPreference_t preference,
                                                         cublasLtMatmulPreferenceAttributes_t attribute,
                                                         const void* value, size_t bytes);
  cublasStatus_t (*cublasLtMatmulPreferenceDestroy)(cublasLtMatmulPreference_t preference);
  cublasStatus_t (*cublasLtMatmulAlgoGetHeuristic)(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                                   cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                   cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                   cublasLtMatmulPreference_t preference, int requested,
                                                   cublasLtMatmulHeuristicResult_t* results, int* returned);
  cublasStatus_t (*cublasLtMatmul)(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                                   cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                   const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                   cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                                   size_t workspace_bytes, cudaStream_t stream);
};

}  // namespace tcgemm::lt
