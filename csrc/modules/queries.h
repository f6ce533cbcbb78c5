// What a module tells Python about its implementations. The dictionaries are the attributes of
// the FFI call plus the dtypes that a call reads off its buffers, so Python describes a problem
// once for both.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/fields.h"
#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

namespace nb = nanobind;

// A dictionary as FieldReader takes it.
class Query {
 public:
  explicit Query(const nb::dict& fields) : fields_(fields) {}

  template <typename T>
  Found get(std::string_view name, T* out) const {
    const nb::str key(name.data(), name.size());
    if (!fields_.contains(key)) return Found::kNo;
    return nb::try_cast(fields_[key], *out) ? Found::kYes : Found::kOfOtherType;
  }

 private:
  const nb::dict& fields_;
};

// The problem that a query describes; ValueError where it describes none.
template <typename Problem>
Problem problem_from(const nb::dict& fields) {
  Problem p{};
  if (std::string error = read_problem(Query(fields), &p); !error.empty()) throw nb::value_error(error.c_str());
  return p;
}

inline Device device_from(nb::dict dict) {
  return {nb::cast<int>(dict["compute_capability"]), nb::cast<int>(dict["num_sms"]),
          nb::cast<int64_t>(dict["shared_memory_bytes"]), nb::cast<bool>(dict["compiles_kernels"])};
}

template <typename Problem, typename Buffers>
const ImplementationOf<Problem, Buffers>& implementation_from(const ImplementationsOf<Problem, Buffers>& all,
                                                              const std::string& name) {
  const auto* found = find_implementation(all, name);
  if (found == nullptr) throw nb::value_error(("unknown implementation: " + name).c_str());
  return *found;
}

inline nb::list as_tuples(const std::vector<KernelSource>& sources) {
  nb::list tuples;
  for (const KernelSource& x : sources) tuples.append(nb::make_tuple(x.header, x.name, x.target));
  return tuples;
}

// Defines implementations(), reject() and workspace_bytes() of one kind of product on `module`.
template <typename Problem, typename Buffers>
void define_queries(nb::module_& module, const ImplementationsOf<Problem, Buffers>& all) {
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
      [&all](const std::string& name, const std::string& config, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        if (!implementation.has_config(config)) return "it has no config " + config;
        return implementation.reject(problem_from<Problem>(problem), device_from(device), config);
      },
      nb::arg("implementation"), nb::arg("config"), nb::arg("problem"), nb::arg("device"),
      "The rule that stops this implementation from running the problem; empty when none does.");
  module.def(
      "rejections",
      [&all](const std::string& name, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        const Problem described = problem_from<Problem>(problem);
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
      [&all](const std::string& name, const std::string& config, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        if (!implementation.has_config(config)) throw nb::value_error((name + " has no config " + config).c_str());
        return implementation.workspace_bytes(problem_from<Problem>(problem), device_from(device), config);
      },
      nb::arg("implementation"), nb::arg("config"), nb::arg("problem"), nb::arg("device"));
  module.def(
      "kernels",
      [&all](const std::string& name, const std::string& config, nb::dict problem, nb::dict device) {
        const auto& implementation = implementation_from<Problem, Buffers>(all, name);
        if (!implementation.has_config(config)) throw nb::value_error((name + " has no config " + config).c_str());
        return as_tuples(implementation.kernels(problem_from<Problem>(problem), device_from(device), config));
      },
      nb::arg("implementation"), nb::arg("config"), nb::arg("problem"), nb::arg("device"),
      "The kernels that a call runs: (header, C++ expression, target) of each.");
}

}  // namespace tcgemm
