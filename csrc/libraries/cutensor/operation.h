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
#include <string_view>
#include <vector>

#include "core/problem.h"
#include "libraries/cutensor/api.h"

namespace tcgemm::cutensor {

enum class Kind : int32_t { kContract, kPermute, kElementwiseBinary, kElementwiseTrinary, kReduce };

struct Operation {
  static constexpr size_t kMaxModes = 64;  // of one array

  std::string kind_name;
  Kind kind;
  DType dtype;                   // of every array
  std::string compute;           // a name of Api::computes
  std::string algorithm;         // contract: default, default_patient, gett, tgett, ttgt
  std::vector<int64_t> extents;  // of each mode; modes are numbered from 0
  std::vector<int32_t> a_modes, b_modes, c_modes, d_modes;
  std::string a_op, b_op, c_op;     // unary operators
  std::string combine_ab, combine;  // binary operators
  bool has_c;
  std::array<std::complex<double>, 3> scalars;  // alpha, beta, gamma
  int64_t workspace_bytes;

  bool has_b() const { return kind == Kind::kContract || kind == Kind::kElementwiseTrinary; }
  size_t num_operands() const { return 1 + has_b() + has_c; }
  int64_t num_elements(const std::vector<int32_t>& modes) const;
};

// Fills in what its names say and checks everything that a malformed program could break, so that what
// follows may rely on it; "" or the first rule that is broken.
std::string check_operation(Operation* operation);

// Numbers of a checked operation's names.
cutensorOperator_t operator_number(const std::string& name);
cutensorAlgo_t algorithm_number(const std::string& name);

// Names of the unary and the binary operators.
std::vector<std::string> unary_operators();
std::vector<std::string> binary_operators();

}  // namespace tcgemm::cutensor
