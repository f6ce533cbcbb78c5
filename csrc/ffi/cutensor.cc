#include "ffi/cutensor.h"

#include "core/cuda_status.h"
#include "core/relaxed_capture.h"
#include "ffi/attributes.h"
#include "ffi/checks.h"

namespace tcgemm::cutensor {
namespace {

namespace ffi = xla::ffi;

// What is wrong with the buffer of an array of the operation; `check` is check_buffer or check_result.
template <typename Buffer, typename Check>
std::string check_array(const Operation& o, const char* name, const std::vector<int32_t>& modes, Buffer& buffer,
                        const Check& check) {
  DType dtype;
  const int64_t count = o.num_elements(modes);
  if (std::string error = check(name, buffer, count, &dtype); !error.empty()) return error;
  if (dtype != o.dtype) return std::string(name) + " must be " + name_of(o.dtype) + ", got " + name_of(dtype);
  if (reinterpret_cast<uintptr_t>(buffer.untyped_data()) % kAlignment != 0) {
    return std::string(name) + " must be aligned to 16 bytes";
  }
  return "";
}

std::string find_buffers(const Operation& o, ffi::RemainingArgs& operands, ffi::RemainingRets& results,
                         Buffers* buffers) {
  if (operands.size() != o.num_operands()) {
    return "operands must be " + std::to_string(o.num_operands()) + ", got " + std::to_string(operands.size());
  }
  size_t index = 0;
  const auto take = [&](const char* name, const std::vector<int32_t>& modes, const void** address) -> std::string {
    auto buffer = operands.get<ffi::AnyBuffer>(index++);
    if (buffer.has_error()) return std::string(name) + " must be a buffer";
    *address = buffer->untyped_data();
    return check_array(o, name, modes, *buffer, check_buffer);
  };
  if (std::string error = take("a", o.a_modes, &buffers->a); !error.empty()) return error;
  if (o.has_b()) {
    if (std::string error = take("b", o.b_modes, &buffers->b); !error.empty()) return error;
  }
  if (o.has_c) {
    if (std::string error = take("c", o.c_modes, &buffers->c); !error.empty()) return error;
  }
  if (results.size() != (o.workspace_bytes > 0 ? 2 : 1)) return "results must be d and, where needed, a workspace";
  auto d = results.get<ffi::AnyBuffer>(0);
  if (d.has_error()) return "d must be a buffer";
  if (std::string error = check_array(o, "d", o.d_modes, **d, check_result); !error.empty()) return error;
  buffers->d = (*d)->untyped_data();
  const auto replaces = [&](size_t operand, size_t result) {
    return o.has_c && operand + 1 == operands.size() && result == 0;
  };
  if (std::string error = check_overlaps(operands, results, replaces); !error.empty()) return error;
  if (o.workspace_bytes == 0) return "";
  struct {
    void* workspace;
    int64_t workspace_bytes;
  } given;
  if (std::string error = take_workspace(results, 1, &given); !error.empty()) return error;
  if (given.workspace_bytes - kWorkspaceAlignment < o.workspace_bytes) {
    return "the workspace must hold " + std::to_string(kWorkspaceAlignment) +
           " bytes over workspace_bytes=" + std::to_string(o.workspace_bytes) + ", got " +
           std::to_string(given.workspace_bytes);
  }
  // XLA aligns buffers to 128 bytes, cuTENSOR wants 256.
  const auto address = reinterpret_cast<uintptr_t>(given.workspace);
  const uintptr_t mask = kWorkspaceAlignment - 1;
  buffers->workspace = reinterpret_cast<void*>((address + mask) & ~mask);
  return "";
}

}  // namespace

ffi::TypeId PlannedCall::id{};

Status PlannedCall::plan(int ordinal, const Plan** plan) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return Status::internal("there are more than 64 devices");
  *plan = plans_[ordinal].load(std::memory_order_acquire);
  if (*plan != nullptr) return Status::ok();
  std::shared_ptr<const Plan> found;
  const RelaxedCapture relaxed;
  if (Status s = find_plan(ordinal, operation_, &found); !s.is_ok()) return s;
  *plan = found.get();
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(found));
  plans_[ordinal].store(*plan, std::memory_order_release);
  return Status::ok();
}

ffi::ErrorOr<std::unique_ptr<PlannedCall>> instantiate(ffi::Dictionary attributes) {
  try {
    Operation operation;
    std::string error = read_attributes(attributes, [&](auto&& visit) { visit_fields(operation, visit); });
    if (error.empty()) error = check_operation(operation);
    if (!error.empty()) return ffi::Unexpected(invalid("cutensor: " + error));
    auto call = std::make_unique<PlannedCall>(std::move(operation));
    int ordinal = 0;
    // Where no device is current, such as when a program is compiled for one elsewhere, the first call
    // makes the plan.
    if (cudaGetDevice(&ordinal) == cudaSuccess) {
      const Plan* plan;
      if (Status s = call->plan(ordinal, &plan); !s.is_ok()) return ffi::Unexpected(to_ffi_error("cutensor", s));
    } else {
      cudaGetLastError();
    }
    return call;
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::Internal(std::string("jax_tcgemm: ") + error.what()));
  }
}

ffi::Error execute(cudaStream_t stream, PlannedCall* call, ffi::Dictionary, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  return without_exceptions([&] {
    const Operation& operation = call->operation();
    Buffers buffers;
    if (std::string error = find_buffers(operation, operands, results, &buffers); !error.empty()) {
      return invalid("cutensor: " + error);
    }
    int ordinal = 0;
    Status status = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice");
    const Plan* plan = nullptr;
    if (status.is_ok()) status = call->plan(ordinal, &plan);
    if (status.is_ok()) {
      const RelaxedCapture relaxed;
      status = plan->run(operation, buffers, stream);
    }
    return to_ffi_error("cutensor", status);
  });
}

}  // namespace tcgemm::cutensor
