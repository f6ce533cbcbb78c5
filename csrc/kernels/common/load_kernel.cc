#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <type_traits>

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
    return Status::internal(what + " failed: " + name);
  }
};

}  // namespace

Status load_kernel(const std::string& name, const std::string& entry, std::string_view cubin) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const Kernel* known = find_kernel(name);
  if (known != nullptr && known->is_built_in()) return Status::ok();
  const Loader& loader = Loader::get();
  const std::string what = "loading " + name;
  if (loader.load_data == nullptr) return Status::internal(what + " takes a driver of CUDA 12.0 or newer");
  const RelaxedCapture relaxed;
  CUkernel kernel = nullptr;
  if (known != nullptr) {
    kernel = static_cast<CUkernel>(const_cast<void*>(known->function()));
  } else {
    // Unloaded only where it has no such function: programs that have it may be executed until the process ends.
    CUlibrary library = nullptr;
    CUresult result = loader.load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != CUDA_SUCCESS) return loader.status(result, what);
    result = loader.get_kernel(&kernel, library, entry.c_str());
    if (result != CUDA_SUCCESS) {
      loader.unload(library);
      return loader.status(result, what);
    }
    add_kernel(name, kernel, false);
  }
  // The driver would otherwise load it on the current device when it is launched there first.
  CUfunction function = nullptr;
  return loader.status(loader.get_function(&function, kernel), what);
}

}  // namespace tcgemm
