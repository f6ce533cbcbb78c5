#include "libraries/cutensor/library.h"

#include "libraries/device_handles.h"

namespace tcgemm::cutensor {

std::string Api::resolve_all(const SharedLibrary& library) {
  TCGEMM_RESOLVE(cutensorGetVersion);
  TCGEMM_RESOLVE(cutensorGetErrorString);
  TCGEMM_RESOLVE(cutensorCreate);
  TCGEMM_RESOLVE(cutensorCreateTensorDescriptor);
  TCGEMM_RESOLVE(cutensorDestroyTensorDescriptor);
  TCGEMM_RESOLVE(cutensorCreateContraction);
  TCGEMM_RESOLVE(cutensorCreatePermutation);
  TCGEMM_RESOLVE(cutensorCreateElementwiseBinary);
  TCGEMM_RESOLVE(cutensorCreateElementwiseTrinary);
  TCGEMM_RESOLVE(cutensorCreateReduction);
  TCGEMM_RESOLVE(cutensorDestroyOperationDescriptor);
  TCGEMM_RESOLVE(cutensorOperationDescriptorGetAttribute);
  TCGEMM_RESOLVE(cutensorCreatePlanPreference);
  TCGEMM_RESOLVE(cutensorDestroyPlanPreference);
  TCGEMM_RESOLVE(cutensorEstimateWorkspaceSize);
  TCGEMM_RESOLVE(cutensorCreatePlan);
  TCGEMM_RESOLVE(cutensorDestroyPlan);
  TCGEMM_RESOLVE(cutensorContract);
  TCGEMM_RESOLVE(cutensorPermute);
  TCGEMM_RESOLVE(cutensorElementwiseBinaryExecute);
  TCGEMM_RESOLVE(cutensorElementwiseTrinaryExecute);
  TCGEMM_RESOLVE(cutensorReduce);
  computes = {{{"f16", "CUTENSOR_COMPUTE_DESC_16F", nullptr},
               {"bf16", "CUTENSOR_COMPUTE_DESC_16BF", nullptr},
               {"tf32", "CUTENSOR_COMPUTE_DESC_TF32", nullptr},
               {"3xtf32", "CUTENSOR_COMPUTE_DESC_3XTF32", nullptr},
               {"f32", "CUTENSOR_COMPUTE_DESC_32F", nullptr},
               {"f64", "CUTENSOR_COMPUTE_DESC_64F", nullptr},
               {"9xbf16", "CUTENSOR_COMPUTE_DESC_9X16BF", nullptr},
               {"8xint8", "CUTENSOR_COMPUTE_DESC_8XINT8", nullptr},
               {"4xf16", "CUTENSOR_COMPUTE_DESC_4X16F", nullptr}}};
  for (NamedCompute& compute : computes) {
    // A variable of the library, which holds the pointer.
    cutensorComputeDescriptor_t* variable = nullptr;
    if (library.resolve(compute.symbol, &variable)) compute.value = *variable;
  }
  return "";
}

std::string load(const std::string& path) { return LoadedLibrary<Api>::open(path.c_str()); }

const Api* api() { return LoadedLibrary<Api>::api(); }

Status device_handle(const Api& api, int ordinal, cutensorHandle_t* handle) {
  static DeviceHandles<cutensorHandle_t> handles;
  const auto create = [&](cutensorHandle_t* made) {
    return to_status(api, api.cutensorCreate(made), "cutensorCreate on device " + std::to_string(ordinal));
  };
  return handles.get(ordinal, create, handle);
}

cutensorComputeDescriptor_t find_compute(const Api& api, std::string_view name) {
  for (const Api::NamedCompute& compute : api.computes) {
    if (name == compute.name) return compute.value;
  }
  return nullptr;
}

Status to_status(const Api& api, cutensorStatus_t status, const std::string& what) {
  if (status == CUTENSOR_STATUS_SUCCESS) return Status::ok();
  const std::string message = what + " failed: " + api.cutensorGetErrorString(status) + " (cuTENSOR " +
                              std::to_string(api.cutensorGetVersion()) + ")";
  const bool is_callers = status == CUTENSOR_STATUS_NOT_SUPPORTED || status == CUTENSOR_STATUS_INVALID_VALUE;
  return is_callers ? Status::invalid(message) : Status::internal(message);
}

}  // namespace tcgemm::cutensor
