// What a module tells Python about its implementations. The dictionaries are the attributes of
// the FFI call plus the dtypes that a call reads off its buffers, so Python describes a problem
// once for both.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "core/implementation.h"
#include "core/problem.h"
#include "core/ragged_problem.h"
#include "core/rows_problem.h"
#include "ffi/checks.h"

namespace tcgemm {

namespace nb = nanobind;

// The value that `parse` knows by the name under `key`.
template <typename Value>
Value parsed_from(nb::dict dict, const char* key, bool (*parse)(std::string_view, Value*)) {
  const std::string name = nb::cast<std::string>(dict[key]);
  Value value;
  if (!parse(name, &value)) throw nb::value_error((std::string(key) + " is unknown: " + name).c_str());
  return value;
}

inline DType dtype_from(nb::dict dict, const char* key) { return parsed_from(dict, key, parse_dtype); }

inline Problem problem_from(nb::dict dict) {
  const auto integer = [&](const char* key) { return nb::cast<int64_t>(dict[key]); };
  const auto operand = [&](const std::string& name) {
    return Operand{dtype_from(dict, (name + "_dtype").c_str()), nb::cast<bool>(dict[(name + "_transposed").c_str()]),
                   integer((name + "_ld").c_str()), integer((name + "_outer_stride").c_str()),
                   integer((name + "_inner_stride").c_str())};
  };
  Problem p;
  p.batch = integer("batch");
  p.batch_inner = integer("batch_inner");
  p.m = integer("m");
  p.n = integer("n");
  p.k = integer("k");
  p.a = operand("a");
  p.b = operand("b");
  p.out = dtype_from(dict, "out_dtype");
  p.alpha = nb::cast<double>(dict["alpha"]);
  p.beta = nb::cast<double>(dict["beta"]);
  p.compute = parsed_from(dict, "compute", parse_compute);
  Epilogue& e = p.epilogue;
  e.activation = parsed_from(dict, "activation", parse_activation);
  e.bias = parsed_from(dict, "bias", parse_bias);
  if (e.bias != Bias::kNone) e.bias_dtype = dtype_from(dict, "bias_dtype");
  e.derivative = nb::cast<bool>(dict["derivative"]);
  e.gated = nb::cast<bool>(dict["gated"]);
  e.aux_out = nb::cast<bool>(dict["aux_out"]);
  e.column_sums = nb::cast<bool>(dict["column_sums"]);
  e.up_offset = integer("up_offset");
  e.bias_batch_stride = integer("bias_batch_stride");
  if (std::string error = check_problem(p); !error.empty()) throw nb::value_error(error.c_str());
  return p;
}

inline RaggedProblem ragged_problem_from(nb::dict dict) {
  const auto integer = [&](const char* key) { return nb::cast<int64_t>(dict[key]); };
  const auto flag = [&](const char* key) { return nb::cast<bool>(dict[key]); };
  RaggedProblem p;
  p.form = parsed_from(dict, "form", parse_ragged_form);
  p.batch = integer("batch");
  p.m = integer("m");
  p.n = integer("n");
  p.k = integer("k");
  p.groups = integer("groups");
  p.num_sizes = integer("num_sizes");
  p.b_transposed = flag("b_transposed");
  p.a_batched = flag("a_batched");
  p.b_batched = flag("b_batched");
  p.sizes_batched = flag("sizes_batched");
  p.gathered = flag("gathered");
  p.a_rows = integer("a_rows");
  p.epilogue.gated = flag("gated");
  p.epilogue.activation = parsed_from(dict, "activation", parse_activation);
  if (flag("biased")) {
    p.epilogue.bias = Bias::kN;
    p.epilogue.bias_dtype = dtype_from(dict, "bias_dtype");
  }
  p.in = dtype_from(dict, "in_dtype");
  p.out = dtype_from(dict, "out_dtype");
  p.compute = parsed_from(dict, "compute", parse_compute);
  if (std::string error = check_problem(p); !error.empty()) throw nb::value_error(error.c_str());
  return p;
}

inline RowsProblem rows_problem_from(nb::dict dict) {
  const auto integer = [&](const char* key) { return nb::cast<int64_t>(dict[key]); };
  const RowsProblem p{parsed_from(dict, "form", parse_rows_form),
                      integer("a_rows"),
                      integer("b_rows"),
                      integer("targets"),
                      integer("pairs"),
                      integer("n"),
                      nb::cast<bool>(dict["weighted"]),
                      dtype_from(dict, "in_dtype")};
  if (std::string error = check_problem(p); !error.empty()) throw nb::value_error(error.c_str());
  return p;
}

inline Device device_from(nb::dict dict) {
  return {nb::cast<int>(dict["compute_capability"]), nb::cast<int>(dict["num_sms"]),
          nb::cast<int64_t>(dict["shared_memory_bytes"])};
}

// Reads the dictionary of a query; raises ValueError where it describes no problem.
template <typename Problem>
using ProblemFrom = Problem (*)(nb::dict);

template <typename Problem, typename Buffers>
const ImplementationOf<Problem, Buffers>& implementation_from(const ImplementationsOf<Problem, Buffers>& all,
                                                              const std::string& name) {
  const auto* found = find_implementation(all, name);
  if (found == nullptr) throw nb::value_error(("unknown implementation: " + name).c_str());
  return *found;
}

// Defines implementations(), reject() and workspace_bytes() of one kind of product on `module`.
template <typename Problem, typename Buffers>
void define_queries(nb::module_& module, const ImplementationsOf<Problem, Buffers>& all,
                    ProblemFrom<Problem> problem_from) {
  module.def(
      "implementations",
      [&all] {
        nb::dict configs;
        for (const auto* implementation : all) configs[implementation->name()] = implementation->configs();
        return configs;
      },
      "Names of the implementations of this module, each with its configs, the default first.");
  module.def(
      "reject",
      [&all, problem_from](const std::string& name, const std::string& config, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        if (!implementation.has_config(config)) return "it has no config " + config;
        return implementation.reject(problem_from(problem), device_from(device), config);
      },
      nb::arg("implementation"), nb::arg("config"), nb::arg("problem"), nb::arg("device"),
      "The rule that stops this implementation from running the problem; empty when none does.");
  module.def(
      "rejections",
      [&all, problem_from](const std::string& name, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        const Problem described = problem_from(problem);
        const Device queried = device_from(device);
        std::vector<std::string> reasons;
        for (const std::string& config : implementation.configs()) {
          reasons.push_back(implementation.reject(described, queried, config));
        }
        return reasons;
      },
      nb::arg("implementation"), nb::arg("problem"), nb::arg("device"), "What reject() says of each config in turn.");
  module.def(
      "workspace_bytes",
      [&all, problem_from](const std::string& name, const std::string& config, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        if (!implementation.has_config(config)) throw nb::value_error((name + " has no config " + config).c_str());
        return implementation.workspace_bytes(problem_from(problem), device_from(device), config);
      },
      nb::arg("implementation"), nb::arg("config"), nb::arg("problem"), nb::arg("device"));
}

}  // namespace tcgemm
