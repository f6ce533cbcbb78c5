// Runs the parts of one host product on XLA's own CPU thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace tcgemm {

class Executor {
 public:
  using Schedule = std::function<void(std::function<void()>)>;

  Executor(int num_threads, Schedule schedule) : num_threads_(num_threads), schedule_(std::move(schedule)) {}

  int num_threads() const { return num_threads_; }

  // Calls body(i) once for each i in [0, count), on the calling thread and on up to
  // num_threads() - 1 others; returns when all are done. The caller takes parts itself and
  // waits only for parts already begun, so it cannot deadlock on a pool it runs in. When a part
  // throws, the others are done all the same, then the call throws that.
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) const {
    if (num_threads_ <= 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    // Owned jointly: a scheduled task may start after this call has returned, and then finds
    // no part left.
    struct Shared {
      std::atomic<int64_t> next{0};
      int64_t done = 0;
      std::exception_ptr thrown;
      std::mutex mutex;
      std::condition_variable all_done;
    };
    auto shared = std::make_shared<Shared>();
    auto work = [shared, count, body = &body] {
      int64_t finished = 0;
      std::exception_ptr thrown;
      for (int64_t i; (i = shared->next.fetch_add(1)) < count; ++finished) {
        try {
          (*body)(i);
        } catch (...) {
          thrown = std::current_exception();
        }
      }
      if (finished == 0) return;
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (thrown) shared->thrown = thrown;
      shared->done += finished;
      if (shared->done == count) shared->all_done.notify_all();
    };
    const int64_t helpers = std::min<int64_t>(num_threads_, count) - 1;
    try {
      for (int64_t i = 0; i < helpers; ++i) schedule_(work);
    } catch (...) {  // out of memory: fewer helpers will do
    }
    work();
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->all_done.wait(lock, [&] { return shared->done == count; });
    if (shared->thrown) std::rethrow_exception(shared->thrown);
  }

 private:
  int num_threads_;
  Schedule schedule_;
};

}  // namespace tcgemm
