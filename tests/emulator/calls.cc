// What Python calls: one product, described by lines "name=value" with the names of csrc/modules/queries.h
// and, as numbers, the addresses of its arrays.
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>

#include "kernels/kernels.h"
#include "machine.h"

namespace tcgemm {
namespace {

class Fields {
 public:
  explicit Fields(const char* text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const size_t equals = line.find('=');
      values_[line.substr(0, equals)] = line.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  int64_t integer(const std::string& name) const { return std::stoll(text(name)); }
  double number(const std::string& name) const { return std::stod(text(name)); }
  bool flag(const std::string& name) const { return text(name) == "True"; }
  // Null where there is no such array.
  template <typename T = void>
  T* address(const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : reinterpret_cast<T*>(std::stoull(found->second));
  }
  template <typename Value>
  Value parsed(const std::string& name, bool (*parse)(std::string_view, Value*)) const {
    Value value;
    if (!parse(text(name), &value)) throw std::runtime_error(name + " is unknown: " + text(name));
    return value;
  }

 private:
  std::map<std::string, std::string> values_;
};

Problem problem_from(const Fields& f) {
  const auto operand = [&](const std::string& name) {
    return Operand{f.parsed(name + "_dtype", parse_dtype), f.flag(name + "_transposed"), f.integer(name + "_ld"),
                   f.integer(name + "_outer_stride"), f.integer(name + "_inner_stride")};
  };
  Problem p{};
  p.batch = f.integer("batch");
  p.batch_inner = f.integer("batch_inner");
  p.m = f.integer("m");
  p.n = f.integer("n");
  p.k = f.integer("k");
  p.a = operand("a");
  p.b = operand("b");
  p.out = f.parsed("out_dtype", parse_dtype);
  p.alpha = f.number("alpha");
  p.beta = f.number("beta");
  p.compute = f.parsed("compute", parse_compute);
  Epilogue& e = p.epilogue;
  e.activation = f.parsed("activation", parse_activation);
  e.bias = f.parsed("bias", parse_bias);
  if (e.bias != Bias::kNone) e.bias_dtype = f.parsed("bias_dtype", parse_dtype);
  e.derivative = f.flag("derivative");
  e.gated = f.flag("gated");
  e.aux_out = f.flag("aux_out");
  e.column_sums = f.flag("column_sums");
  e.up_offset = f.integer("up_offset");
  e.bias_batch_stride = f.integer("bias_batch_stride");
  return p;
}

Buffers buffers_from(const Fields& f, const Problem& p) {
  Buffers buffers;
  buffers.a = f.address("a_array");
  buffers.b = f.address("b_array");
  buffers.c = f.address("c_array");
  buffers.d = f.address("d_array");
  buffers.b_up = f.address("b_up_array");
  if (p.epilogue.up_offset != 0) {
    buffers.b_up = static_cast<const char*>(buffers.b) + p.epilogue.up_offset * dtype_bytes(p.b.dtype);
  }
  buffers.bias = f.address("bias_array");
  buffers.aux_in = f.address("aux_in_array");
  buffers.aux_out = f.address("aux_out_array");
  buffers.column_sums = f.address("column_sums_array");
  return buffers;
}

RaggedProblem ragged_problem_from(const Fields& f) {
  RaggedProblem p{};
  p.form = f.parsed("form", parse_ragged_form);
  p.batch = f.integer("batch");
  p.m = f.integer("m");
  p.n = f.integer("n");
  p.k = f.integer("k");
  p.groups = f.integer("groups");
  p.num_sizes = f.integer("num_sizes");
  p.b_transposed = f.flag("b_transposed");
  p.a_batched = f.flag("a_batched");
  p.b_batched = f.flag("b_batched");
  p.sizes_batched = f.flag("sizes_batched");
  p.gathered = f.flag("gathered");
  p.a_rows = f.integer("a_rows");
  p.epilogue.gated = f.flag("gated");
  p.epilogue.activation = f.parsed("activation", parse_activation);
  if (f.flag("biased")) {
    p.epilogue.bias = Bias::kN;
    p.epilogue.bias_dtype = f.parsed("bias_dtype", parse_dtype);
  }
  p.in = f.parsed("in_dtype", parse_dtype);
  p.out = f.parsed("out_dtype", parse_dtype);
  p.compute = f.parsed("compute", parse_compute);
  return p;
}

RaggedBuffers ragged_buffers_from(const Fields& f, const RaggedProblem&) {
  RaggedBuffers buffers{};
  buffers.a = f.address("a_array");
  buffers.b = f.address("b_array");
  buffers.group_sizes = f.address<const int32_t>("group_sizes_array");
  buffers.group_offset = f.address<const int32_t>("group_offset_array");
  buffers.d = f.address("d_array");
  buffers.bias = f.address("bias_array");
  buffers.gather = f.address<const int32_t>("gather_array");
  return buffers;
}

RowsProblem rows_problem_from(const Fields& f) {
  return {f.parsed("form", parse_rows_form),
          f.integer("a_rows"),
          f.integer("b_rows"),
          f.integer("targets"),
          f.integer("pairs"),
          f.integer("n"),
          f.flag("weighted"),
          f.parsed("in_dtype", parse_dtype)};
}

RowsBuffers rows_buffers_from(const Fields& f, const RowsProblem&) {
  RowsBuffers buffers{};
  buffers.a = f.address("a_array");
  buffers.b = f.address("b_array");
  buffers.indices = f.address<const int32_t>("indices_array");
  buffers.b_indices = f.address<const int32_t>("b_indices_array");
  buffers.starts = f.address<const int32_t>("starts_array");
  buffers.weights = f.address("weights_array");
  buffers.d = f.address("d_array");
  return buffers;
}

// One entry of `implementations`, so that those that were not compiled are never called.
template <typename Problem, typename Buffers>
using Named = std::map<std::string, const ImplementationOf<Problem, Buffers>* (*)()>;

template <typename Problem, typename Buffers>
std::string run(const Fields& f, const Named<Problem, Buffers>& implementations, Problem (*make_problem)(const Fields&),
                Buffers (*make_buffers)(const Fields&, const Problem&)) {
  const Problem p = make_problem(f);
  if (std::string error = check_problem(p); !error.empty()) return error;
  const auto found = implementations.find(f.text("implementation"));
  if (found == implementations.end()) return "unknown implementation: " + f.text("implementation");
  const ImplementationOf<Problem, Buffers>& implementation = *found->second();
  const std::string& config = f.text("config");
  if (!implementation.has_config(config)) return "it has no config " + config;

  emulator::Machine& machine = emulator::Machine::get();
  machine.options.seed = static_cast<uint64_t>(f.integer("seed"));
  machine.options.num_sms = static_cast<int>(f.integer("num_sms"));
  machine.options.loose_warpgroups = f.flag("loose_warpgroups");
  machine.options.mutant = static_cast<int>(f.integer("mutant"));
  machine.last_error.clear();
  const Device device{TCGEMM_EMULATED_ARCH / 10, machine.options.num_sms, 232448};
  if (std::string reason = implementation.reject(p, device, config); !reason.empty()) return "rejected: " + reason;
  Buffers buffers = make_buffers(f, p);
  buffers.workspace_bytes = implementation.workspace_bytes(p, device, config);
  const size_t bytes = (static_cast<size_t>(buffers.workspace_bytes) + 255) / 256 * 256;
  const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(256, std::max<size_t>(bytes, 256)),
                                                         std::free);
  std::memset(workspace.get(), 0xFF, std::max<size_t>(bytes, 256));  // NaN
  buffers.workspace = workspace.get();
  if (p.is_empty()) return "";
  const Status status = implementation.launch(p, buffers, device, config, nullptr);
  return status.is_ok() ? machine.last_error : status.message;
}

template <typename Problem, typename Buffers>
const char* run_without_exceptions(const char* fields, const Named<Problem, Buffers>& implementations,
                                   Problem (*make_problem)(const Fields&),
                                   Buffers (*make_buffers)(const Fields&, const Problem&)) {
  static std::string message;
  try {
    message = run(Fields(fields), implementations, make_problem, make_buffers);
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
  static const Named<Problem, Buffers> implementations{
      {"simt_naive", &simt_naive}, {"simt_tiled", &simt_tiled}, {"mma_sync", &mma_sync}, {"wgmma", &wgmma}};
  return run_without_exceptions(fields, implementations, &problem_from, &buffers_from);
}

const char* emulate_ragged(const char* fields) {
  using namespace tcgemm;
  static const Named<RaggedProblem, RaggedBuffers> implementations{{"mma_sync", &mma_sync_ragged},
                                                                   {"wgmma", &wgmma_ragged}};
  return run_without_exceptions(fields, implementations, &ragged_problem_from, &ragged_buffers_from);
}

const char* emulate_rows(const char* fields) {
  using namespace tcgemm;
  static const Named<RowsProblem, RowsBuffers> implementations{{"simt", &simt_rows}};
  return run_without_exceptions(fields, implementations, &rows_problem_from, &rows_buffers_from);
}

void emulate_missing(const char* function) {
  throw std::runtime_error(std::string("this emulation was built without ") + function);
}

}  // extern "C"
