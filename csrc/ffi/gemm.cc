#include "ffi/gemm.h"

#include <string>
#include <utility>
#include <vector>

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

// Buffers of a call by the names of their roles.
using NamedBuffers = std::vector<std::pair<std::string_view, ffi::AnyBuffer>>;

const ffi::AnyBuffer* find(const NamedBuffers& buffers, std::string_view name) {
  for (const auto& [known, buffer] : buffers) {
    if (name == known) return &buffer;
  }
  return nullptr;
}

void* data(const NamedBuffers& buffers, std::string_view name) {
  const ffi::AnyBuffer* buffer = find(buffers, name);
  return buffer == nullptr ? nullptr : buffer->untyped_data();
}

std::string joined(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

// Names the operands or results of a call, which come in this order.
template <typename Values>
std::string name_buffers(const Values& values, const std::vector<std::string_view>& names, NamedBuffers* out) {
  if (values.size() != names.size()) return "must be " + joined(names) + ", got " + std::to_string(values.size());
  for (size_t i = 0; i < names.size(); ++i) {
    auto value = values.template get<ffi::AnyBuffer>(i);
    if (value.has_error()) return "must be buffers, and " + std::string(names[i]) + " is not";
    if constexpr (std::is_same_v<Values, ffi::RemainingRets>) {
      out->emplace_back(names[i], **value);
    } else {
      out->emplace_back(names[i], *value);
    }
  }
  return "";
}

// What the attributes alone say of a problem: all but the dtypes of its buffers.
std::string read_attributes(const GemmAttributes& attrs, Problem* p) {
  p->batch = attrs.batch;
  p->batch_inner = attrs.batch_inner;
  p->m = attrs.m;
  p->n = attrs.n;
  p->k = attrs.k;
  p->a = {DType::kF32, attrs.a_transposed, attrs.a_ld, attrs.a_outer_stride, attrs.a_inner_stride};
  p->b = {DType::kF32, attrs.b_transposed, attrs.b_ld, attrs.b_outer_stride, attrs.b_inner_stride};
  p->alpha = attrs.alpha;
  p->beta = attrs.beta;
  p->epilogue.derivative = attrs.derivative;
  p->epilogue.gated = attrs.gated;
  p->epilogue.up_offset = attrs.up_offset;
  p->epilogue.bias_batch_stride = attrs.bias_batch_stride;
  p->epilogue.aux_out = attrs.aux_out;
  p->epilogue.column_sums = attrs.column_sums;
  if (!parse_compute(attrs.compute, &p->compute)) {
    return "compute must be f16, f32, tf32, f64 or s32, got " + std::string(attrs.compute);
  }
  if (!parse_bias(attrs.bias, &p->epilogue.bias)) return "bias must be none, n or m, got " + std::string(attrs.bias);
  if (!parse_activation(attrs.activation, &p->epilogue.activation)) {
    const std::vector<std::string> names = activation_names();
    return "activation must be " + joined({names.begin(), names.end()}) + ", got " + std::string(attrs.activation);
  }
  return "";
}

// Reads the dtypes that determine the problem off its buffers.
std::string read_dtypes(const NamedBuffers& buffers, Problem* p) {
  for (const auto& [name, out] : {std::pair<std::string_view, DType*>{"a", &p->a.dtype},
                                  {"b", &p->b.dtype},
                                  {"d", &p->out},
                                  {"bias", &p->epilogue.bias_dtype}}) {
    const ffi::AnyBuffer* buffer = find(buffers, name);
    if (buffer != nullptr && !from_xla(buffer->element_type(), out)) {
      return std::string(name) + " must have a supported dtype, got XLA type " +
             std::to_string(static_cast<int>(buffer->element_type()));
    }
  }
  return "";
}

// Whether every buffer holds what the problem reads and writes, in the dtypes it has them.
std::string check_buffers(const NamedBuffers& buffers, const Problem& p) {
  struct Rule {
    std::string_view name;
    int64_t elements;
    DType dtype;
    std::string (*check)(std::string_view, const ffi::AnyBuffer&, int64_t, DType*);
  };
  const Rule rules[] = {
      {"a", required_elements_a(p), p.a.dtype, &check_buffer},
      {"b", required_elements_b(p), p.b.dtype, &check_buffer},
      {"b_up", required_elements_b(p), p.b.dtype, &check_buffer},
      {"c", required_elements_d(p), p.out, &check_buffer},
      {"bias", required_elements_bias(p), p.epilogue.bias_dtype, &check_buffer},
      {"aux_in", required_elements_aux(p), p.out, &check_buffer},
      {"d", required_elements_d(p), p.out, &check_result},
      {"aux_out", required_elements_aux(p), p.out, &check_result},
      {"column_sums", required_elements_column_sums(p), sum_dtype(p), &check_result},
  };
  for (const auto& [name, elements, dtype, check] : rules) {
    const ffi::AnyBuffer* buffer = find(buffers, name);
    if (buffer == nullptr) continue;
    DType got;
    if (std::string error = check(name, *buffer, elements, &got); !error.empty()) return error;
    if (got != dtype) {
      return std::string(name) + " must have the dtype " + dtype_name(dtype) + ", got " + dtype_name(got);
    }
  }
  return "";
}

ffi::Error run_gemm_checked(const Implementations& implementations, const Device& device, void* stream,
                            const GemmAttributes& attrs, ffi::RemainingArgs& operands, ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  Problem p;
  if (std::string error = read_attributes(attrs, &p); !error.empty()) return invalid(error);

  std::vector<std::string_view> inputs{"a", "b"}, outputs{"d"};
  const Epilogue& e = p.epilogue;
  if (p.has_two_b() && e.up_offset == 0) inputs.push_back("b_up");
  // C may be given although it is not read.
  const size_t without_c = inputs.size() + (e.bias != Bias::kNone) + e.derivative;
  if (p.beta != 0.0 || operands.size() > without_c) inputs.push_back("c");
  if (e.bias != Bias::kNone) inputs.push_back("bias");
  if (e.derivative) inputs.push_back("aux_in");
  if (e.aux_out) outputs.push_back("aux_out");
  if (e.column_sums) outputs.push_back("column_sums");
  if (results.size() > outputs.size()) outputs.push_back("workspace");
  NamedBuffers named;
  if (std::string error = name_buffers(operands, inputs, &named); !error.empty()) return invalid("operands " + error);
  if (std::string error = name_buffers(results, outputs, &named); !error.empty()) return invalid("results " + error);
  if (std::string error = read_dtypes(named, &p); !error.empty()) return invalid(error);
  if (std::string error = check_problem(p); !error.empty()) return invalid(error);
  if (std::string error = check_buffers(named, p); !error.empty()) return invalid(error);
  if (e.column_sums && p.m == 0) return invalid("m must be at least 1 with column_sums, got 0");
  // D may take the place of C, or of the aux_in that it is the derivative at.
  const auto replaces = [&](size_t operand, size_t result) {
    return result == 0 && (inputs[operand] == "c" || inputs[operand] == "aux_in");
  };
  if (std::string error = check_overlaps(operands, results, replaces); !error.empty()) return invalid(error);

  Buffers buffers;
  buffers.a = data(named, "a");
  buffers.b = data(named, "b");
  buffers.b_up = data(named, "b_up");
  if (e.up_offset != 0 && buffers.b != nullptr) {
    buffers.b_up = static_cast<const char*>(buffers.b) + e.up_offset * dtype_bytes(p.b.dtype);
  }
  buffers.c = p.beta != 0.0 ? data(named, "c") : nullptr;
  buffers.bias = data(named, "bias");
  buffers.aux_in = data(named, "aux_in");
  buffers.d = data(named, "d");
  buffers.aux_out = data(named, "aux_out");
  buffers.column_sums = data(named, "column_sums");
  if (find(named, "workspace") != nullptr) {
    if (std::string error = take_workspace(results, outputs.size() - 1, &buffers); !error.empty())
      return invalid(error);
  }
  return launch_checked(implementations, p, buffers, device, attrs.implementation, attrs.config, stream);
}

}  // namespace

xla::ffi::Error run_gemm(const Implementations& implementations, const Device& device, void* stream,
                         const GemmAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return without_exceptions(
      [&] { return run_gemm_checked(implementations, device, stream, attributes, operands, results); });
}

}  // namespace tcgemm
