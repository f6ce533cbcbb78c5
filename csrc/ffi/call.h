// The body of the XLA FFI handlers of products, sums of rows and BLAS routines, shared by both platforms: decodes the
// attributes, checks them against the buffers, finds the implementation, launches it.
//
//   operands, results   those of the problem's buffer_table(); after the operands one for each kernel that the program
//                       carries (kernel.h), after the results a workspace of uint8, where the implementation asks for
//                       one
//   attributes          abi, implementation, config, and the problem's fields, as visit_fields() names them
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/buffers.h"
#include "core/implementation.h"
#include "ffi/attributes.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

template <typename Problem, typename Buffers>
struct GivenBuffer {
  const BufferRule<Problem, Buffers>* rule;
  xla::ffi::AnyBuffer buffer;

  bool is_replaced() const { return rule->role == BufferRole::kReplaced || rule->role == BufferRole::kOptional; }
};

inline xla::ffi::AnyBuffer buffer_of(xla::ffi::AnyBuffer& operand) { return operand; }
inline xla::ffi::AnyBuffer buffer_of(xla::ffi::Result<xla::ffi::AnyBuffer>& result) { return *result; }

// How many operands a call has but for kernels: single elements of a type that no problem has.
inline size_t count_operands(const xla::ffi::RemainingArgs& operands) {
  size_t count = operands.size();
  while (count > 0) {
    auto last = operands.get<xla::ffi::AnyBuffer>(count - 1);
    if (last.has_error() || last->element_type() != xla::ffi::DataType::PRED || last->element_count() != 1) break;
    --count;
  }
  return count;
}

// Appends the first `num_values` of the operands or the results of a call, each with its rule. What is wrong with them,
// or nothing.
template <typename Values, typename Problem, typename Buffers>
std::string match_buffers(const Values& values, size_t num_values, const Problem& p,
                          const BufferTable<Problem, Buffers>& table,
                          std::vector<GivenBuffer<Problem, Buffers>>* given) {
  constexpr bool kAreResults = std::is_same_v<Values, xla::ffi::RemainingRets>;
  const auto num_given = static_cast<int64_t>(num_values);
  // Nothing has checked the problem yet: it may ask for as many as an integer says, which are not to be added up.
  const auto at_most_too_many = [&](int64_t count) { return std::clamp<int64_t>(count, 0, num_given + 1); };
  int64_t num_needed = 0;
  for (const auto& rule : table) {
    if (rule.is_result() == kAreResults) num_needed += at_most_too_many(rule.count(p));
  }
  const bool has_more = num_given > num_needed;
  const auto count = [&](const BufferRule<Problem, Buffers>& rule) -> int64_t {
    if (rule.is_result() != kAreResults) return 0;
    return rule.role == BufferRole::kOptional && has_more ? 1 : rule.count(p);
  };
  const int64_t num_workspaces = kAreResults && has_more;
  int64_t num_expected = num_workspaces;
  for (const auto& rule : table) num_expected += at_most_too_many(count(rule));
  if (num_given != num_expected) {
    std::string names;
    const auto add = [&](int64_t number, const char* name) {
      if (number == 0) return;
      names += (names.empty() ? "" : ", ") + (number == 1 ? "" : std::to_string(number) + " ") + name;
    };
    for (const auto& rule : table) add(count(rule), rule.name);
    add(num_workspaces, "workspace");
    return "must be " + names + ", got " + std::to_string(num_given);
  }
  size_t position = 0;
  for (const auto& rule : table) {
    for (int64_t i = count(rule); i > 0; --i) {
      auto value = values.template get<xla::ffi::AnyBuffer>(position++);
      if (value.has_error()) return std::string("must be buffers, and ") + rule.name + " is not";
      given->push_back({&rule, buffer_of(*value)});
    }
  }
  return "";
}

// Checks what is given and takes the addresses.
template <typename Problem, typename Buffers>
std::string take_buffers(const std::vector<GivenBuffer<Problem, Buffers>>& given, const Problem& p, Buffers* buffers) {
  std::vector<int64_t> replaced;  // elements of operands in whose place results may lie
  size_t num_successors = 0;
  for (const auto& [rule, buffer] : given) {
    if (rule->elements == nullptr) {
      if (!has_whole_bytes(buffer.element_type())) {
        return std::string(rule->name) + " must have elements of whole bytes, got XLA type " +
               std::to_string(static_cast<int>(buffer.element_type()));
      }
      rule->put(p, *buffers, buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes()));
      continue;
    }
    int64_t elements = rule->elements(p);
    if (rule->role == BufferRole::kSuccessor && num_successors < replaced.size()) elements = replaced[num_successors++];
    if (rule->is_result() && p.is_empty() && elements > 0) {  // Nothing is launched, and it would not be written.
      return std::string(rule->name) + " must not be asked for where there is no element of d";
    }
    DType dtype;
    const auto check = rule->is_result() ? &check_result : &check_buffer;
    if (std::string error = check(rule->name, buffer, elements, &dtype); !error.empty()) return error;
    if (const DType expected = rule->dtype(p); dtype != expected) {
      return std::string(rule->name) + " must have the dtype " + name_of(expected) + ", got " + name_of(dtype);
    }
    const auto count = static_cast<int64_t>(buffer.element_count());
    if (rule->role == BufferRole::kReplaced) replaced.push_back(count);
    rule->put(p, *buffers, buffer.untyped_data(), count);
  }
  return check_buffers(p, *buffers);
}

// The rest of a call whose problem and buffers have been checked: finds the implementation, asks it,
// checks its workspace, launches.
template <typename Problem, typename Buffers>
xla::ffi::Error launch_checked(const ImplementationsOf<Problem, Buffers>& implementations, const Problem& problem,
                               const Buffers& buffers, const Device& device, std::string_view implementation_name,
                               std::string_view config, void* stream) {
  const auto* implementation = find_implementation(implementations, implementation_name);
  if (implementation == nullptr) {
    return invalid("implementation " + std::string(implementation_name) + " is not part of this build");
  }
  const std::string name = implementation->name();
  if (!implementation->has_config(config)) return invalid(name + " has no config " + std::string(config));
  if (std::string reason = implementation->reject(problem, device, config); !reason.empty()) {
    return invalid(name + " cannot run this: " + reason);
  }
  // Extents of an empty one are those of no buffer, so that nothing can be computed from them.
  if (problem.is_empty()) return xla::ffi::Error::Success();
  const int64_t workspace_bytes = implementation->workspace_bytes(problem, device, config);
  if (buffers.workspace_bytes < workspace_bytes) {
    return invalid("workspace of " + name + " must hold " + std::to_string(workspace_bytes) + " bytes, got " +
                   std::to_string(buffers.workspace_bytes));
  }
  return to_ffi_error(name, implementation->launch(problem, buffers, device, config, stream));
}

template <typename Problem, typename Buffers>
xla::ffi::Error run_call_checked(const ImplementationsOf<Problem, Buffers>& implementations, const Device& device,
                                 void* stream, const xla::ffi::Dictionary& attributes,
                                 const xla::ffi::RemainingArgs& operands, const xla::ffi::RemainingRets& results,
                                 Buffers buffers) {
  std::string_view implementation, config;
  Problem p{};
  std::string error = read_attributes(attributes, [&](auto&& visit) {
    visit("implementation", implementation);
    visit("config", config);
    visit_fields(p, visit);
  });
  if (!error.empty()) return invalid(error);
  const BufferTable<Problem, Buffers>& table = buffer_table(p);
  std::vector<GivenBuffer<Problem, Buffers>> given;
  given.reserve(operands.size() + results.size());
  const size_t num_operands = count_operands(operands);
  if (error = match_buffers(operands, num_operands, p, table, &given); !error.empty()) {
    return invalid("operands " + error);
  }
  if (error = match_buffers(results, results.size(), p, table, &given); !error.empty()) {
    return invalid("results " + error);
  }
  visit_dtypes(p, [&](std::string_view name, const char*, DType& dtype) {
    for (const auto& [rule, buffer] : given) {
      if (name != rule->name) continue;
      if (error.empty()) error = check_buffer(name, buffer, 0, &dtype);
      return;
    }
  });
  if (!error.empty()) return invalid(error);
  if (error = check_problem(p); !error.empty()) return invalid(error);
  if (error = take_buffers(given, p, &buffers); !error.empty()) return invalid(error);
  const size_t num_results = given.size() - num_operands;
  const auto replaces = [&](size_t operand, size_t result) {
    if (operand >= num_operands || !given[operand].is_replaced() || result >= num_results) return false;
    size_t number = 0;  // of the operand among those that are replaced
    for (size_t i = 0; i < operand; ++i) number += given[i].is_replaced();
    return result == (given[num_operands].rule->role == BufferRole::kSuccessor ? number : 0);
  };
  if (error = check_overlaps(operands, results, replaces); !error.empty()) return invalid(error);
  if (results.size() > num_results) {
    if (error = take_workspace(results, num_results, &buffers); !error.empty()) return invalid(error);
  }
  return launch_checked(implementations, p, buffers, device, implementation, config, stream);
}

// Runs one call. Never throws: every failure is an ffi::Error, InvalidArgument for anything a malformed program can
// cause. No operand is read here. The addresses of the call's buffers are added to `initial`, which may hold more.
template <typename Problem, typename Buffers>
xla::ffi::Error run_call(const ImplementationsOf<Problem, Buffers>& implementations, const Device& device, void* stream,
                         const xla::ffi::Dictionary& attributes, const xla::ffi::RemainingArgs& operands,
                         const xla::ffi::RemainingRets& results, const Buffers& initial = {}) {
  return without_exceptions(
      [&] { return run_call_checked(implementations, device, stream, attributes, operands, results, initial); });
}

}  // namespace tcgemm
