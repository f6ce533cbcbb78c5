// The part of cuTENSOR 2 that is used, declared here so that neither its headers nor its library are
// needed to build. Names, values and signatures are those of cutensor.h and cutensor/types.h of
// cuTENSOR 2.0 to 2.8; all handles and descriptors are opaque.
// https://docs.nvidia.com/cuda/cutensor/latest/api/index.html
#pragma once

#include <driver_types.h>
#include <library_types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "libraries/shared_library.h"

namespace tcgemm::cutensor {

enum cutensorStatus_t : int {
  CUTENSOR_STATUS_SUCCESS = 0,
  CUTENSOR_STATUS_INVALID_VALUE = 7,
  CUTENSOR_STATUS_NOT_SUPPORTED = 15,
};

enum cutensorAlgo_t : int {
  CUTENSOR_ALGO_DEFAULT_PATIENT = -6,
  CUTENSOR_ALGO_GETT = -4,
  CUTENSOR_ALGO_TGETT = -3,
  CUTENSOR_ALGO_TTGT = -2,
  CUTENSOR_ALGO_DEFAULT = -1,
};

enum cutensorJitMode_t : int { CUTENSOR_JIT_MODE_NONE = 0 };

enum cutensorWorksizePreference_t : int { CUTENSOR_WORKSPACE_DEFAULT = 2 };

enum cutensorOperationDescriptorAttribute_t : int {
  CUTENSOR_OPERATION_DESCRIPTOR_SCALAR_TYPE = 1,  // cudaDataType_t
};

// Values of cutensorOperator_t: names and numbers are in operation.cc.
using cutensorOperator_t = int;

struct cutensorHandle;
struct cutensorTensorDescriptor;
struct cutensorOperationDescriptor;
struct cutensorPlanPreference;
struct cutensorPlan;
struct cutensorComputeDescriptor;
using cutensorHandle_t = cutensorHandle*;
using cutensorTensorDescriptor_t = cutensorTensorDescriptor*;
using cutensorOperationDescriptor_t = cutensorOperationDescriptor*;
using cutensorPlanPreference_t = cutensorPlanPreference*;
using cutensorPlan_t = cutensorPlan*;
using cutensorComputeDescriptor_t = cutensorComputeDescriptor*;

// The functions of a loaded library, and its compute descriptors, which are variables that it exports. A compute
// descriptor that this version lacks is null.
struct Api {
  static constexpr std::array kSonames{"libcutensor.so.2"};

  size_t (*cutensorGetVersion)();
  const char* (*cutensorGetErrorString)(cutensorStatus_t status);
  cutensorStatus_t (*cutensorCreate)(cutensorHandle_t* handle);
  cutensorStatus_t (*cutensorCreateTensorDescriptor)(cutensorHandle_t handle, cutensorTensorDescriptor_t* desc,
                                                     uint32_t num_modes, const int64_t extent[], const int64_t stride[],
                                                     cudaDataType_t type, uint32_t alignment);
  cutensorStatus_t (*cutensorDestroyTensorDescriptor)(cutensorTensorDescriptor_t desc);
  cutensorStatus_t (*cutensorCreateContraction)(cutensorHandle_t handle, cutensorOperationDescriptor_t* desc,
                                                cutensorTensorDescriptor_t a, const int32_t a_modes[],
                                                cutensorOperator_t a_op, cutensorTensorDescriptor_t b,
                                                const int32_t b_modes[], cutensorOperator_t b_op,
                                                cutensorTensorDescriptor_t c, const int32_t c_modes[],
                                                cutensorOperator_t c_op, cutensorTensorDescriptor_t d,
                                                const int32_t d_modes[], cutensorComputeDescriptor_t compute);
  cutensorStatus_t (*cutensorCreatePermutation)(cutensorHandle_t handle, cutensorOperationDescriptor_t* desc,
                                                cutensorTensorDescriptor_t a, const int32_t a_modes[],
                                                cutensorOperator_t a_op, cutensorTensorDescriptor_t b,
                                                const int32_t b_modes[], cutensorComputeDescriptor_t compute);
  cutensorStatus_t (*cutensorCreateElementwiseBinary)(cutensorHandle_t handle, cutensorOperationDescriptor_t* desc,
                                                      cutensorTensorDescriptor_t a, const int32_t a_modes[],
                                                      cutensorOperator_t a_op, cutensorTensorDescriptor_t c,
                                                      const int32_t c_modes[], cutensorOperator_t c_op,
                                                      cutensorTensorDescriptor_t d, const int32_t d_modes[],
                                                      cutensorOperator_t ac_op, cutensorComputeDescriptor_t compute);
  cutensorStatus_t (*cutensorCreateElementwiseTrinary)(cutensorHandle_t handle, cutensorOperationDescriptor_t* desc,
                                                       cutensorTensorDescriptor_t a, const int32_t a_modes[],
                                                       cutensorOperator_t a_op, cutensorTensorDescriptor_t b,
                                                       const int32_t b_modes[], cutensorOperator_t b_op,
                                                       cutensorTensorDescriptor_t c, const int32_t c_modes[],
                                                       cutensorOperator_t c_op, cutensorTensorDescriptor_t d,
                                                       const int32_t d_modes[], cutensorOperator_t ab_op,
                                                       cutensorOperator_t abc_op, cutensorComputeDescriptor_t compute);
  cutensorStatus_t (*cutensorCreateReduction)(cutensorHandle_t handle, cutensorOperationDescriptor_t* desc,
                                              cutensorTensorDescriptor_t a, const int32_t a_modes[],
                                              cutensorOperator_t a_op, cutensorTensorDescriptor_t c,
                                              const int32_t c_modes[], cutensorOperator_t c_op,
                                              cutensorTensorDescriptor_t d, const int32_t d_modes[],
                                              cutensorOperator_t reduce_op, cutensorComputeDescriptor_t compute);
  cutensorStatus_t (*cutensorDestroyOperationDescriptor)(cutensorOperationDescriptor_t desc);
  cutensorStatus_t (*cutensorOperationDescriptorGetAttribute)(cutensorHandle_t handle,
                                                              cutensorOperationDescriptor_t desc,
                                                              cutensorOperationDescriptorAttribute_t attribute,
                                                              void* value, size_t bytes);
  cutensorStatus_t (*cutensorCreatePlanPreference)(cutensorHandle_t handle, cutensorPlanPreference_t* preference,
                                                   cutensorAlgo_t algorithm, cutensorJitMode_t jit);
  cutensorStatus_t (*cutensorDestroyPlanPreference)(cutensorPlanPreference_t preference);
  cutensorStatus_t (*cutensorEstimateWorkspaceSize)(cutensorHandle_t handle, cutensorOperationDescriptor_t desc,
                                                    cutensorPlanPreference_t preference,
                                                    cutensorWorksizePreference_t size, uint64_t* bytes);
  cutensorStatus_t (*cutensorCreatePlan)(cutensorHandle_t handle, cutensorPlan_t* plan,
                                         cutensorOperationDescriptor_t desc, cutensorPlanPreference_t preference,
                                         uint64_t workspace_limit);
  cutensorStatus_t (*cutensorDestroyPlan)(cutensorPlan_t plan);
  cutensorStatus_t (*cutensorContract)(cutensorHandle_t handle, cutensorPlan_t plan, const void* alpha, const void* a,
                                       const void* b, const void* beta, const void* c, void* d, void* workspace,
                                       uint64_t workspace_bytes, cudaStream_t stream);
  cutensorStatus_t (*cutensorPermute)(cutensorHandle_t handle, cutensorPlan_t plan, const void* alpha, const void* a,
                                      void* b, cudaStream_t stream);
  cutensorStatus_t (*cutensorElementwiseBinaryExecute)(cutensorHandle_t handle, cutensorPlan_t plan, const void* alpha,
                                                       const void* a, const void* gamma, const void* c, void* d,
                                                       cudaStream_t stream);
  cutensorStatus_t (*cutensorElementwiseTrinaryExecute)(cutensorHandle_t handle, cutensorPlan_t plan, const void* alpha,
                                                        const void* a, const void* beta, const void* b,
                                                        const void* gamma, const void* c, void* d, cudaStream_t stream);
  cutensorStatus_t (*cutensorReduce)(cutensorHandle_t handle, cutensorPlan_t plan, const void* alpha, const void* a,
                                     const void* beta, const void* c, void* d, void* workspace,
                                     uint64_t workspace_bytes, cudaStream_t stream);

  struct NamedCompute {
    const char* name;
    const char* symbol;
    cutensorComputeDescriptor_t value;
  };
  std::array<NamedCompute, 9> computes;

  // Looks all of them up; returns an error message, or "".
  std::string resolve_all(const SharedLibrary& library);
};

}  // namespace tcgemm::cutensor
