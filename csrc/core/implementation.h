// The interface shared by hand-written kernels, vendor libraries and the host implementation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/features.h"
#include "core/problem.h"

namespace tcgemm {

// What an implementation may ask of the device when it decides whether it can run.
struct Device {
  int compute_capability = 0;  // 10 * major + minor; 0 for the host
  int num_sms = 0;
  int64_t shared_memory_bytes = 0;  // largest opt-in dynamic shared memory of one block
  bool compiles_kernels = true;     // whether programs for it can bring kernels
};

// What a kernel is compiled from: the device headers that every build ships.
struct KernelSource {
  std::string header;  // that declares it, below csrc
  std::string name;    // the C++ expression that instantiates it
  std::string target;  // such as "sm_90a"; of a kernel that every device has for itself: empty, until one is known
};

struct Status {
  enum class Code { kOk, kInvalidArgument, kInternal };
  Code code = Code::kOk;
  std::string message;

  static Status ok() { return {}; }
  static Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
  static Status internal(std::string message) { return {Code::kInternal, std::move(message)}; }
  bool is_ok() const { return code == Code::kOk; }
};

// `Problem` and `Buffers` say what kind of product: see problem.h and ragged_problem.h.
template <typename Problem, typename Buffers>
class ImplementationOf {
 public:
  virtual ~ImplementationOf() = default;

  virtual const char* name() const = 0;

  // Every config that can be forced by name; the first is the default.
  virtual const std::vector<std::string>& configs() const = 0;

  // Whether `config` is one of them.
  virtual bool has_config(std::string_view config) const {
    return std::find(configs().begin(), configs().end(), config) != configs().end();
  }

  // What of the features that problems may have (features_of) some config can do, and what this one can.
  virtual Features features() const = 0;
  virtual Features config_features(std::string_view config) const { return features(); }

  // Empty when `config` runs `problem` exactly on `device`; else the rule that stops it, as a
  // phrase that reads after "<name> cannot run this: ". `problem` has passed check_problem(). What stops every config
  // comes first; a rule that is of this one alone begins with its name: "config 64x64x64 ...".
  std::string reject(const Problem& problem, const Device& device, std::string_view config) const {
    const Features needed = features_of(problem);
    if (std::string lack = features().lack(needed); !lack.empty()) return "it has " + lack;
    if (std::string rule = reject_rest(problem, device, config); !rule.empty()) return rule;
    if (std::string lack = config_features(config).lack(needed); !lack.empty()) {
      return "config " + std::string(config) + " has " + lack;
    }
    if (device.compiles_kernels || kernels(problem, device, config).empty()) return "";
    return "NVRTC to compile its kernel is missing; install nvidia-cuda-nvrtc";
  }

  // Scratch bytes launch() needs. May be an upper bound; must depend on its arguments only.
  virtual int64_t workspace_bytes(const Problem& problem, const Device& device, std::string_view config) const {
    return 0;
  }

  // The kernels of launch(), which a program must bring.
  virtual std::vector<KernelSource> kernels(const Problem& problem, const Device& device,
                                            std::string_view config) const {
    return {};
  }

  // Enqueues the product on `stream` (a cudaStream_t; on the host an Executor). No allocation, no
  // synchronisation, no host read of device memory, no state kept: it may run under graph
  // capture, from several threads and for several devices. `problem` is not empty (see
  // Problem::is_empty) but k may be 0. Base addresses are only known to be aligned to their
  // element size.
  virtual Status launch(const Problem& problem, const Buffers& buffers, const Device& device, std::string_view config,
                        void* stream) const = 0;

 protected:
  // reject() beyond features.
  virtual std::string reject_rest(const Problem& problem, const Device& device, std::string_view config) const = 0;
};

// All implementations of one kind of product in one module, in the order of the ladder.
template <typename Problem, typename Buffers>
using ImplementationsOf = std::vector<const ImplementationOf<Problem, Buffers>*>;

using Implementation = ImplementationOf<Problem, Buffers>;
using Implementations = ImplementationsOf<Problem, Buffers>;

template <typename Problem, typename Buffers>
const ImplementationOf<Problem, Buffers>* find_implementation(
    const std::vector<const ImplementationOf<Problem, Buffers>*>& all, std::string_view name) {
  for (const auto* implementation : all) {
    if (name == implementation->name()) return implementation;
  }
  return nullptr;
}

}  // namespace tcgemm
