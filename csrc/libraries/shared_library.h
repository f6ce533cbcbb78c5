// Opening a vendor's library at run time and looking its functions up by name.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

namespace tcgemm {

// A library that is open; it is never closed.
class SharedLibrary {
 public:
  explicit SharedLibrary(void* handle) : handle_(handle) {}

  template <typename Function>
  bool resolve(const char* name, Function* function) const {
    *function = reinterpret_cast<Function>(dlsym(handle_, name));
    return *function != nullptr;
  }

 private:
  void* handle_;
};

// The functions of one library, found once and shared by all of the process. `Api` is a struct of
// function pointers with
//   static constexpr std::array kSonames{...};              the names that fit, newest first
//   std::string resolve_all(const SharedLibrary& library);  fills them in; "" or what is missing
template <typename Api>
class LoadedLibrary {
 public:
  // Opens the library and keeps it; "" when it is usable, else why not. One that the process
  // already has comes first, so that JAX and this module always share one; `path` may be null.
  static std::string open(const char* path) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (loaded_.load(std::memory_order_relaxed)) return "";
    void* handle = nullptr;
    for (const char* soname : Api::kSonames) {
      if (handle == nullptr) handle = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (handle == nullptr && path == nullptr) return "it is not loaded";
    if (handle == nullptr) handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) return dlerror();
    if (const std::string missing = api_.resolve_all(SharedLibrary(handle)); !missing.empty()) {
      return "the library found has no " + missing + "; it must be one of " + sonames();
    }
    loaded_.store(true, std::memory_order_release);
    return "";
  }

  // The library that open() found, or one that something else in the process has loaded since;
  // null when there is neither. Once not null it stays the same and valid.
  static const Api* api() {
    if (!loaded_.load(std::memory_order_acquire) && !open(nullptr).empty()) return nullptr;
    return &api_;
  }

 private:
  static std::string sonames() {
    std::string text;
    for (const char* soname : Api::kSonames) text += (text.empty() ? "" : ", ") + std::string(soname);
    return text;
  }

  // Written once, before `loaded_` is set.
  static inline Api api_{};
  static inline std::atomic<bool> loaded_{false};
};

}  // namespace tcgemm

// In a resolve_all(): looks one function up under its own name.
#define TCGEMM_RESOLVE(function) \
  if (!library.resolve(#function, &function)) return #function
