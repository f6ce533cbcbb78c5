// The part of cuBLAS that is used, declared here so that neither its headers nor its library are
// needed to build. Names, values and signatures are those of cublas_api.h of CUDA 12 and 13, where
// they agree, but that element pointers are void pointers: the functions of the four types S, D, C
// and Z are one type then, and an array of four.
// https://docs.nvidia.com/cuda/cublas/#using-the-cublas-api
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

namespace tcgemm::cublas {

enum cublasStatus_t : int {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cublasOperation_t : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasFillMode_t : int { CUBLAS_FILL_MODE_LOWER = 0, CUBLAS_FILL_MODE_UPPER = 1 };
enum cublasDiagType_t : int { CUBLAS_DIAG_NON_UNIT = 0, CUBLAS_DIAG_UNIT = 1 };
enum cublasSideMode_t : int { CUBLAS_SIDE_LEFT = 0, CUBLAS_SIDE_RIGHT = 1 };
enum cublasPointerMode_t : int { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 };
enum cublasAtomicsMode_t : int { CUBLAS_ATOMICS_NOT_ALLOWED = 0, CUBLAS_ATOMICS_ALLOWED = 1 };
enum cublasGemmAlgo_t : int { CUBLAS_GEMM_DEFAULT = -1 };
enum cublasMath_t : int {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_PEDANTIC_MATH = 2,
  CUBLAS_TF32_TENSOR_OP_MATH = 3,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
};
enum cublasComputeType_t : int {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_PEDANTIC = 69,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
  CUBLAS_COMPUTE_64F = 70,
  CUBLAS_COMPUTE_64F_PEDANTIC = 71,
};

struct cublasContext;
using cublasHandle_t = cublasContext*;

using Index = cublasStatus_t(cublasHandle_t, int n, const void* x, cudaDataType_t x_type, int incx, int* result);
using Reduction = cublasStatus_t(cublasHandle_t, int n, const void* x, cudaDataType_t x_type, int incx, void* result,
                                 cudaDataType_t result_type, cudaDataType_t execution_type);
using Asum = cublasStatus_t(cublasHandle_t, int n, const void* x, int incx, void* result);
using Dot = cublasStatus_t(cublasHandle_t, int n, const void* x, cudaDataType_t x_type, int incx, const void* y,
                           cudaDataType_t y_type, int incy, void* result, cudaDataType_t result_type,
                           cudaDataType_t execution_type);
using Gemv = cublasStatus_t(cublasHandle_t, cublasOperation_t trans, int m, int n, const void* alpha, const void* a,
                            int lda, const void* x, int incx, const void* beta, void* y, int incy);
using GemvStridedBatched = cublasStatus_t(cublasHandle_t, cublasOperation_t trans, int m, int n, const void* alpha,
                                          const void* a, int lda, long long stride_a, const void* x, int incx,
                                          long long stride_x, const void* beta, void* y, int incy, long long stride_y,
                                          int batch);
using Gbmv = cublasStatus_t(cublasHandle_t, cublasOperation_t trans, int m, int n, int kl, int ku, const void* alpha,
                            const void* a, int lda, const void* x, int incx, const void* beta, void* y, int incy);
using Trsv = cublasStatus_t(cublasHandle_t, cublasFillMode_t, cublasOperation_t trans, cublasDiagType_t, int n,
                            const void* a, int lda, void* x, int incx);
using Trsm = cublasStatus_t(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t trans,
                            cublasDiagType_t, int m, int n, const void* alpha, const void* a, int lda, void* b,
                            int ldb);
using TrsmBatched = cublasStatus_t(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t trans,
                                   cublasDiagType_t, int m, int n, const void* alpha, const void* const* a, int lda,
                                   void* const* b, int ldb, int batch);

// The functions of the loaded library (libraries/shared_library.h).
struct Api {
  static constexpr std::array kSonames{"libcublas.so.13", "libcublas.so.12"};
  std::string resolve_all(const SharedLibrary& library);

  cublasStatus_t (*cublasGetProperty)(libraryPropertyType type, int* value);
  const char* (*cublasGetStatusName)(cublasStatus_t status);
  cublasStatus_t (*cublasLoggerConfigure)(int on, int to_stdout, int to_stderr, const char* file);
  cublasStatus_t (*cublasCreate_v2)(cublasHandle_t* handle);
  cublasStatus_t (*cublasSetStream_v2)(cublasHandle_t handle, cudaStream_t stream);
  cublasStatus_t (*cublasSetWorkspace_v2)(cublasHandle_t handle, void* workspace, size_t bytes);
  cublasStatus_t (*cublasSetPointerMode_v2)(cublasHandle_t handle, cublasPointerMode_t mode);
  cublasStatus_t (*cublasSetAtomicsMode)(cublasHandle_t handle, cublasAtomicsMode_t mode);
  cublasStatus_t (*cublasSetMathMode)(cublasHandle_t handle, int mode);

  Index *cublasIamaxEx, *cublasIaminEx;
  Reduction* cublasNrm2Ex;
  Dot *cublasDotEx, *cublasDotcEx;
  cublasStatus_t (*cublasScalEx)(cublasHandle_t handle, int n, const void* alpha, cudaDataType_t alpha_type, void* x,
                                 cudaDataType_t x_type, int incx, cudaDataType_t execution_type);
  cublasStatus_t (*cublasAxpyEx)(cublasHandle_t handle, int n, const void* alpha, cudaDataType_t alpha_type,
                                 const void* x, cudaDataType_t x_type, int incx, void* y, cudaDataType_t y_type,
                                 int incy, cudaDataType_t execution_type);
  cublasStatus_t (*cublasSwapEx)(cublasHandle_t handle, int n, void* x, cudaDataType_t x_type, int incx, void* y,
                                 cudaDataType_t y_type, int incy);
  cublasStatus_t (*cublasGemmEx)(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                 int k, const void* alpha, const void* a, cudaDataType_t a_type, int lda, const void* b,
                                 cudaDataType_t b_type, int ldb, const void* beta, void* c, cudaDataType_t c_type,
                                 int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo);
  cublasStatus_t (*cublasGemmStridedBatchedEx)(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                                               int m, int n, int k, const void* alpha, const void* a,
                                               cudaDataType_t a_type, int lda, long long stride_a, const void* b,
                                               cudaDataType_t b_type, int ldb, long long stride_b, const void* beta,
                                               void* c, cudaDataType_t c_type, int ldc, long long stride_c, int batch,
                                               cublasComputeType_t compute, cublasGemmAlgo_t algo);
  cublasStatus_t (*cublasGemmBatchedEx)(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                        int n, int k, const void* alpha, const void* const* a, cudaDataType_t a_type,
                                        int lda, const void* const* b, cudaDataType_t b_type, int ldb, const void* beta,
                                        void* const* c, cudaDataType_t c_type, int ldc, int batch,
                                        cublasComputeType_t compute, cublasGemmAlgo_t algo);

  // Of S, D, C and Z.
  std::array<Asum*, 4> asum;
  std::array<Gemv*, 4> gemv;
  std::array<Gbmv*, 4> gbmv;
  std::array<Trsv*, 4> trsv;
  std::array<Trsm*, 4> trsm;
  std::array<TrsmBatched*, 4> trsm_batched;
  // And of float16 and bfloat16 accumulated in float32.
  std::array<GemvStridedBatched*, 6> gemv_strided_batched;
};

}  // namespace tcgemm::cublas
