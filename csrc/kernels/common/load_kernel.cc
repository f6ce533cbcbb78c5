#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "core/driver.h"
#include "core/relaxed_capture.h"
#include "kernels/common/kernel.h"

namespace tcgemm {
namespace {

// What loads kernels; all of them null where the driver is older than CUDA 12.0.
struct Loader {
  decltype(&cuLibraryLoadData) load_data = nullptr;
  decltype(&cuLibraryUnload) unload = nullptr;
  decltype(&cuLibraryGetKernel) get_kernel = nullptr;
  decltype(&cuKernelGetFunction) get_function = nullptr;
  decltype(&cuGetErrorName) get_error_name = nullptr;

  static const Loader& get() {
    static const Loader loader = [] {
      Loader found;
      const auto find = [](const char* name, auto* function) {
        *function = find_driver_function<std::remove_pointer_t<decltype(function)>>(name, 12000);
        return *function != nullptr;
      };
      const bool has_all = find("cuLibraryLoadData", &found.load_data) && find("cuLibraryUnload", &found.unload) &&
                           find("cuLibraryGetKernel", &found.get_kernel) &&
                           find("cuKernelGetFunction", &found.get_function) &&
                           find("cuGetErrorName", &found.get_error_name);
      return has_all ? found : Loader{};
    }();
    return loader;
  }

  Status status(CUresult result, const std::string& what) const {
    if (result == CUDA_SUCCESS) return Status::ok();
    const char* name = nullptr;
    if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
    std::string message = what + " failed: " + name;
    switch (result) {
      case CUDA_ERROR_INVALID_IMAGE:
      case CUDA_ERROR_INVALID_SOURCE:
      case CUDA_ERROR_NO_BINARY_FOR_GPU:
      case CUDA_ERROR_NOT_FOUND: return Status::invalid(std::move(message));
      default: return Status::internal(std::move(message));
    }
  }
};

std::string loading(const std::string& name, const std::string& target) { return "loading " + name + " for " + target; }

}  // namespace

std::optional<Status> load_known_kernel(const std::string& name, const std::string& target) {
  const Kernel* known = find_kernel(name, target);
  if (known == nullptr) return std::nullopt;
  const Loader& loader = Loader::get();
  const RelaxedCapture relaxed;
  // Asked for here, for the driver would otherwise load it on the current device when it is launched there first.
  CUfunction function = nullptr;
  const auto kernel = static_cast<CUkernel>(const_cast<void*>(known->function()));
  return loader.status(loader.get_function(&function, kernel), loading(name, target));
}

Status load_kernel(const std::string& name, const std::string& target, const std::string& entry,
                   std::string_view cubin) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  // By another program, meanwhile.
  if (const std::optional<Status> found = load_known_kernel(name, target)) return *found;
  const Loader& loader = Loader::get();
  const std::string what = loading(name, target);
  if (loader.load_data == nullptr) return Status::internal(what + " takes a driver of CUDA 12.0 or newer");
  const RelaxedCapture relaxed;
  CUfunction function = nullptr;
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUresult result = loader.load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != CUDA_SUCCESS) return loader.status(result, what);
  result = loader.get_kernel(&kernel, library, entry.c_str());
  if (result == CUDA_SUCCESS) result = loader.get_function(&function, kernel);
  if (result != CUDA_SUCCESS) {
    loader.unload(library);
    return loader.status(result, what);
  }
  // Never unloaded from here on: a program that has it may be executed until the process ends.
  add_kernel(name, kernel, target);
  return Status::ok();
}

}  // namespace tcgemm
