// Threads, each with a number, that wait for each other once.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "core/implementation.h"

namespace tcgemm::all_reduce {

template <typename T>
class Rendezvous {
 public:
  Rendezvous(size_t num_threads, std::chrono::milliseconds patience) : num_threads_(num_threads), patience_(patience) {}

  // Waits for the other threads. The last one calls make(sorted numbers, &result), which returns a Status; what it
  // makes is the result of all and of every later call. A failed attempt, also one that takes too long, is forgotten.
  template <typename Make>
  Status meet(int number, const Make& make, const T** result) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (result_ == nullptr) {
      if (Status s = attempt(number, make, &lock); !s.is_ok()) return s;
    }
    *result = result_;
    return Status::ok();
  }

  // Null before threads have met.
  const T* result() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return result_;
  }

 private:
  template <typename Make>
  Status attempt(int number, const Make& make, std::unique_lock<std::mutex>* lock) {
    if (std::find(arrived_.begin(), arrived_.end(), number) == arrived_.end()) arrived_.push_back(number);
    if (arrived_.size() == num_threads_) {
      std::sort(arrived_.begin(), arrived_.end());
      status_ = make(arrived_, &result_);
      arrived_.clear();
      ++num_attempts_;
      has_changed_.notify_all();
      return status_;
    }
    const int own = num_attempts_;
    if (has_changed_.wait_for(*lock, patience_, [&] { return num_attempts_ != own; })) {
      return result_ != nullptr ? Status::ok() : status_;
    }
    const std::string num_arrived = std::to_string(arrived_.size());
    arrived_.erase(std::remove(arrived_.begin(), arrived_.end(), number), arrived_.end());
    return Status::internal(num_arrived + " of " + std::to_string(num_threads_) + " devices began the program within " +
                            std::to_string(patience_.count()) + " ms");
  }

  const size_t num_threads_;
  const std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  std::condition_variable has_changed_;
  std::vector<int> arrived_;
  int num_attempts_ = 0;
  Status status_;  // of the last attempt
  const T* result_ = nullptr;
};

}  // namespace tcgemm::all_reduce
