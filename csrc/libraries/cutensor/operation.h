// The one description of a tensor operation for cuTENSOR: plain data, without addresses, made from the
// attributes of an FFI call or from a query. Every array is packed row-major.
//
//   contract             D = alpha * opA(A) * opB(B) + beta * C          summed over the modes D lacks
//   permute              D = alpha * opA(A)
//   elementwise_binary   D = combine(alpha * opA(A), gamma * opC(C))
//   elementwise_trinary  D = combine(combine_ab(alpha * opA(A), beta * opB(B)), gamma * opC(C))
//   reduce               D = alpha * combine over the modes D lacks of opA(A) + beta * C
//
// C has D's modes. Without C (contract and reduce alone) beta is 0.
#pragma once

#include <array>
#include <complex>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.h"
#include "libraries/cutensor/api.h"

namespace tcgemm {
namespace cutensor {

enum class Kind : int32_t { kContract, kPermute, kElementwiseBinary, kElementwiseTrinary, kReduce };

}  // namespace cutensor

template <>
inline constexpr std::array kNames<cutensor::Kind>{"contract", "permute", "elementwise_binary", "elementwise_trinary",
                                                   "reduce"};

namespace cutensor {

struct Operation {
  static constexpr size_t kMaxModes = 64;  // of one array

  Kind kind = Kind::kContract;
  DType dtype = DType::kF32;     // of every array
  std::string compute;           // a name of Api::computes
  std::string algorithm;         // contract: default, default_patient, gett, tgett, ttgt
  std::vector<int64_t> extents;  // of each mode; modes are numbered from 0
  std::vector<int32_t> a_modes, b_modes, c_modes, d_modes;
  std::string a_op, b_op, c_op;     // unary operators
  std::string combine_ab, combine;  // binary operators
  bool has_c = false;
  std::vector<double> scalars;  // real and imaginary parts of alpha, beta, gamma
  int64_t workspace_bytes = 0;

  bool has_b() const { return kind == Kind::kContract || kind == Kind::kElementwiseTrinary; }
  size_t num_operands() const { return 1 + has_b() + has_c; }
  int64_t num_elements(const std::vector<int32_t>& modes) const;
  std::complex<double> scalar(int index) const { return {scalars[2 * index], scalars[2 * index + 1]}; }
};

// See core/problem.h.
template <typename Visit>
void visit_fields(Operation& o, Visit&& visit) {
  visit("operation", o.kind);
  visit("dtype", o.dtype);
  visit("compute", o.compute);
  visit("algorithm", o.algorithm);
  visit("extents", o.extents);
  visit("a_modes", o.a_modes);
  visit("b_modes", o.b_modes);
  visit("c_modes", o.c_modes);
  visit("d_modes", o.d_modes);
  visit("a_op", o.a_op);
  visit("b_op", o.b_op);
  visit("c_op", o.c_op);
  visit("combine_ab", o.combine_ab);
  visit("combine", o.combine);
  visit("has_c", o.has_c);
  visit("scalars", o.scalars);
  visit("workspace_bytes", o.workspace_bytes);
}

// Checks everything that a malformed program could break, so that what follows may rely on it; "" or the first rule
// that is broken.
std::string check_operation(const Operation& operation);

// Numbers of a checked operation's names.
cutensorOperator_t operator_number(const std::string& name);
cutensorAlgo_t algorithm_number(const std::string& name);

// Names of the unary and the binary operators.
std::vector<std::string> unary_operators();
std::vector<std::string> binary_operators();

}  // namespace cutensor
}  // namespace tcgemm
