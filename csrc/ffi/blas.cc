#include "ffi/blas.h"

#include "ffi/checks.h"

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

// Takes buffers one by one, checking dtype and size, and remembers the first that is wrong.
class Reader {
 public:
  Reader(ffi::RemainingArgs& operands, ffi::RemainingRets& results) : operands_(operands), results_(results) {}

  const std::string& error() const { return error_; }

  // `count`, where given, becomes how many there are.
  const void* operand(const std::string& name, DType dtype, int64_t elements, int64_t* count = nullptr) {
    auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++);
    if (buffer.has_error()) return fail(name + " must be a buffer");
    if (count != nullptr) *count = static_cast<int64_t>(buffer->element_count());
    return checked(name, *buffer, dtype, elements, &check_buffer);
  }

  void* result(const std::string& name, DType dtype, int64_t elements) {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    if (buffer.has_error()) return fail(name + " must be a buffer");
    return checked(name, **buffer, dtype, elements, &check_result);
  }

 private:
  void* fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return nullptr;
  }

  template <typename Check>
  void* checked(const std::string& name, ffi::AnyBuffer buffer, DType dtype, int64_t elements, const Check& check) {
    DType got;
    if (!from_xla(buffer.element_type(), &got) || got != dtype) {
      return fail(name + " must have the dtype " + dtype_name(dtype) + ", got XLA type " +
                  std::to_string(static_cast<int>(buffer.element_type())));
    }
    if (std::string error = check(name, buffer, elements, &got); !error.empty()) return fail(std::move(error));
    return buffer.untyped_data();
  }

  ffi::RemainingArgs& operands_;
  ffi::RemainingRets& results_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::string error_;
};

DType result_dtype(const blas::Problem& p) {
  switch (p.routine) {
    case blas::Routine::kIamax:
    case blas::Routine::kIamin: return DType::kS32;
    case blas::Routine::kAsum:
    case blas::Routine::kNrm2: return blas::real_dtype(p.dtype);
    default: return p.dtype;
  }
}

// The dtype of the problem: that of the first operand.
bool first_dtype(ffi::RemainingArgs& operands, DType* dtype) {
  auto first = operands.get<ffi::AnyBuffer>(0);
  return !first.has_error() && from_xla(first->element_type(), dtype);
}

ffi::Error run_blas_checked(const blas::Implementations& implementations, const Device& device, void* stream,
                            const BlasAttributes& attrs, ffi::RemainingArgs& operands, ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  blas::Problem p;
  if (!first_dtype(operands, &p.dtype)) return invalid("operands must have a supported dtype");
  if (std::string error = read_problem(attrs, &p); !error.empty()) return invalid(error);

  const blas::Routine routine = p.routine;
  const bool has_a = blas::has_a(routine), has_b = blas::has_b(routine);
  const auto items = static_cast<size_t>(p.items);
  const size_t num_operands = items * (has_a + has_b + p.has_c) + 2 * p.scalar_args;
  if (operands.size() != num_operands) {
    return invalid("operands must be " + std::to_string(num_operands) + " arrays for " + blas::describe(p) + ", got " +
                   std::to_string(operands.size()));
  }
  const bool has_workspace = results.size() == items + 1;
  if (results.size() != items && !has_workspace) {
    return invalid("results must be " + std::to_string(items) + " and an optional workspace, got " +
                   std::to_string(results.size()));
  }

  Reader reader(operands, results);
  blas::Buffers buffers;
  for (size_t i = 0; has_a && i < items; ++i) {
    buffers.a.push_back(reader.operand("a", p.dtype, blas::required_elements_a(p)));
  }
  for (size_t i = 0; has_b && i < items; ++i) {
    buffers.b.push_back(reader.operand("b", p.dtype, blas::required_elements_b(p)));
  }
  // The second vector of a swap has the layout b.
  const auto c_elements = [&](size_t i) {
    if (!blas::has_result_like_c(routine)) return p.batch;
    return routine == blas::Routine::kSwap && i == 1 ? blas::required_elements_b(p) : blas::required_elements_c(p);
  };
  std::vector<int64_t> written;  // elements of each result, which has all of the c that it replaces
  for (size_t i = 0; i < items; ++i) {
    written.push_back(c_elements(i));
    if (!p.has_c) continue;
    buffers.c.push_back(reader.operand("c", p.dtype, c_elements(i), &written[i]));
    buffers.c_bytes.push_back(written[i] * dtype_bytes(p.dtype));
  }
  if (p.scalar_args) {
    buffers.alpha = reader.operand("alpha", blas::scale_dtype(p.dtype), 1);
    buffers.beta = reader.operand("beta", blas::scale_dtype(p.dtype), 1);
  }
  for (size_t i = 0; i < items; ++i) {
    buffers.d.push_back(reader.result("the result", result_dtype(p), written[i]));
  }
  if (!reader.error().empty()) return invalid(reader.error());
  if (has_workspace) {
    if (std::string error = take_workspace(results, items, &buffers); !error.empty()) return invalid(error);
  }
  const size_t first_c = items * (has_a + has_b);
  const auto replaces = [&](size_t operand, size_t result) { return p.has_c && operand == first_c + result; };
  if (std::string error = check_overlaps(operands, results, replaces); !error.empty()) return invalid(error);

  return launch_checked(implementations, p, buffers, device, attrs.implementation, attrs.config, stream);
}

}  // namespace

std::string read_problem(const BlasAttributes& attrs, blas::Problem* p) {
  if (!blas::parse_routine(attrs.routine, &p->routine)) return "routine is unknown: " + std::string(attrs.routine);
  for (const auto& [name, op] : {std::pair{attrs.op_a, &p->op_a}, {attrs.op_b, &p->op_b}}) {
    if (!blas::parse_op(name, op)) return "op must be N, T or C, got " + std::string(name);
  }
  if (!blas::parse_math(attrs.math, &p->math)) {
    return "math must be default, tf32, pedantic or no_reduced_precision, got " + std::string(attrs.math);
  }
  p->batch = attrs.batch;
  p->items = attrs.items;
  p->m = attrs.m;
  p->n = attrs.n;
  p->k = attrs.k;
  p->kl = attrs.kl;
  p->ku = attrs.ku;
  p->a = {attrs.a_ld, attrs.a_stride};
  p->b = {attrs.b_ld, attrs.b_stride};
  p->c = {attrs.c_ld, attrs.c_stride};
  p->upper = attrs.upper;
  p->right = attrs.right;
  p->unit = attrs.unit;
  p->has_c = attrs.has_c;
  p->scalar_args = attrs.scalar_args;
  p->atomics = attrs.atomics;
  p->alpha = {attrs.alpha_re, attrs.alpha_im};
  p->beta = {attrs.beta_re, attrs.beta_im};
  return blas::check_problem(*p);
}

ffi::Error run_blas(const blas::Implementations& implementations, const Device& device, void* stream,
                    const BlasAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return without_exceptions(
      [&] { return run_blas_checked(implementations, device, stream, attributes, operands, results); });
}

}  // namespace tcgemm
