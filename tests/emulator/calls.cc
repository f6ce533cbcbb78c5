// What Python calls: one product, described by lines "name=value" with the names of the problem's fields and, as
// numbers, the addresses of its arrays.
#include <cstdlib>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

#include "core/fields.h"
#include "kernels/kernels.h"
#include "machine.h"

namespace tcgemm {
namespace {

// As FieldReader takes them.
class Fields {
 public:
  explicit Fields(const char* text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const size_t equals = line.find('=');
      values_[line.substr(0, equals)] = line.substr(equals + 1);
    }
  }

  template <typename T>
  Found get(std::string_view name, T* out) const {
    const auto found = values_.find(std::string(name));
    if (found == values_.end()) return Found::kNo;
    if constexpr (std::is_same_v<T, std::string_view> || std::is_same_v<T, std::string>) {
      *out = found->second;
    } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
      std::istringstream numbers(found->second);
      out->assign(std::istream_iterator<int64_t>(numbers), {});
    } else {
      std::istringstream(found->second == "True" ? "1" : found->second == "False" ? "0" : found->second) >> *out;
    }
    return Found::kYes;
  }

  template <typename T>
  T value(const std::string& name) const {
    T value{};
    if (get(name, &value) != Found::kYes) throw std::runtime_error(name + " must be given");
    return value;
  }

  // Null where there is no such array.
  void* array(const std::string& name) const {
    uintptr_t address = 0;
    get(name + "_array", &address);
    return reinterpret_cast<void*>(address);
  }

 private:
  std::map<std::string, std::string> values_;
};

// One entry of `implementations`, so that those that were not compiled are never called.
template <typename Problem, typename Buffers>
using Named = std::map<std::string_view, const ImplementationOf<Problem, Buffers>* (*)()>;

template <typename Problem, typename Buffers>
std::string run(const Fields& f, const Named<Problem, Buffers>& implementations) {
  Problem p{};
  if (std::string error = read_problem(f, &p); !error.empty()) return error;
  const auto name = f.value<std::string_view>("implementation"), config = f.value<std::string_view>("config");
  const auto found = implementations.find(name);
  if (found == implementations.end()) return "unknown implementation: " + std::string(name);
  const ImplementationOf<Problem, Buffers>& implementation = *found->second();
  if (!implementation.has_config(config)) return "it has no config " + std::string(config);

  emulator::Machine& machine = emulator::Machine::get();
  machine.options.seed = f.value<uint64_t>("seed");
  machine.options.last_cluster_first = f.value<bool>("last_cluster_first");
  machine.options.num_sms = f.value<int>("num_sms");
  machine.options.loose_warpgroups = f.value<bool>("loose_warpgroups");
  machine.options.mutant = f.value<int>("mutant");
  machine.last_error.clear();
  const Device device{TCGEMM_EMULATED_ARCH / 10, machine.options.num_sms, 232448};
  if (std::string reason = implementation.reject(p, device, config); !reason.empty()) return "rejected: " + reason;
  Buffers buffers;
  for (const auto& rule : buffer_table(p)) {
    if (rule.count(p) > 0 && rule.elements != nullptr) rule.put(p, buffers, f.array(rule.name), rule.elements(p));
    for (int64_t i = 0; i < rule.count(p) && rule.elements == nullptr; ++i) {
      const std::string name = rule.name + (" " + std::to_string(i));
      rule.put(p, buffers, f.array(name), f.value<int64_t>(name + "_bytes"));
    }
  }
  if (std::string error = check_buffers(p, buffers); !error.empty()) return error;
  buffers.workspace_bytes = implementation.workspace_bytes(p, device, config);
  // As much again lies after it, NaN likewise: what reads past the workspace is found by its values.
  const size_t bytes = 2 * ((static_cast<size_t>(buffers.workspace_bytes) + 255) / 256 * 256) + 256;
  const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(256, bytes), std::free);
  std::memset(workspace.get(), 0xFF, bytes);
  buffers.workspace = workspace.get();
  if (p.is_empty()) return "";
  const Status status = implementation.launch(p, buffers, device, config, nullptr);
  return status.is_ok() ? machine.last_error : status.message;
}

template <typename Problem, typename Buffers>
const char* run_without_exceptions(const char* fields, const Named<Problem, Buffers>& implementations) {
  static std::string message;
  try {
    message = run(Fields(fields), implementations);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace
}  // namespace tcgemm

extern "C" {

// Each returns what went wrong, or nothing.
const char* emulate_gemm(const char* fields) {
  using namespace tcgemm;
  static const Named<Problem, Buffers> implementations{{"simt_naive", &simt_naive},    {"simt_tiled", &simt_tiled},
                                                       {"wmma_naive", &wmma_naive},    {"wmma_tiled", &wmma_tiled},
                                                       {"mma_sync", &mma_sync},        {"wgmma", &wgmma},
                                                       {"simt_batched", &simt_batched}};
  return run_without_exceptions(fields, implementations);
}

const char* emulate_ragged(const char* fields) {
  using namespace tcgemm;
  static const Named<RaggedProblem, RaggedBuffers> implementations{{"mma_sync", &mma_sync_ragged},
                                                                   {"wgmma", &wgmma_ragged}};
  return run_without_exceptions(fields, implementations);
}

const char* emulate_rows(const char* fields) {
  using namespace tcgemm;
  static const Named<RowsProblem, RowsBuffers> implementations{{"simt", &simt_rows}};
  return run_without_exceptions(fields, implementations);
}

const char* emulate_packed(const char* fields) {
  using namespace tcgemm;
  static const Named<PackedProblem, PackedBuffers> implementations{{"packed", &packed_products}};
  return run_without_exceptions(fields, implementations);
}

const char* emulate_quantize(const char* fields) {
  using namespace tcgemm;
  static const Named<QuantizeProblem, QuantizeBuffers> implementations{{"quantize", &quantizer}};
  return run_without_exceptions(fields, implementations);
}

const char* emulate_split(const char* fields) {
  using namespace tcgemm;
  static const Named<SplitProblem, SplitBuffers> implementations{{"split", &splitter}};
  return run_without_exceptions(fields, implementations);
}

void emulate_missing(const char* function) {
  throw std::runtime_error(std::string("this emulation was built without ") + function);
}

}  // extern "C"
