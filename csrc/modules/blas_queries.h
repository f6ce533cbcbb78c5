// The queries of modules/queries.h about BLAS calls: the attributes of the FFI call plus `dtype`.
#pragma once

#include "core/blas.h"
#include "ffi/blas.h"
#include "modules/queries.h"

namespace tcgemm {

inline blas::Problem blas_problem_from(nb::dict dict) {
  const auto integer = [&](const char* key) { return nb::cast<int64_t>(dict[key]); };
  const auto flag = [&](const char* key) { return nb::cast<bool>(dict[key]); };
  const auto real = [&](const char* key) { return nb::cast<double>(dict[key]); };
  // Views of strings that the dictionary keeps.
  const auto text = [&](const char* key) { return std::string_view(nb::cast<const char*>(dict[key])); };
  const BlasAttributes attributes{
      integer("abi"),      text("implementation"), text("config"),      text("routine"),  text("op_a"),
      text("op_b"),        text("math"),           integer("batch"),    integer("items"), integer("m"),
      integer("n"),        integer("k"),           integer("kl"),       integer("ku"),    integer("a_ld"),
      integer("a_stride"), integer("b_ld"),        integer("b_stride"), integer("c_ld"),  integer("c_stride"),
      flag("upper"),       flag("right"),          flag("unit"),        flag("has_c"),    flag("scalar_args"),
      flag("atomics"),     real("alpha_re"),       real("alpha_im"),    real("beta_re"),  real("beta_im")};
  blas::Problem problem;
  problem.dtype = dtype_from(dict, "dtype");
  if (std::string error = read_problem(attributes, &problem); !error.empty()) throw nb::value_error(error.c_str());
  return problem;
}

}  // namespace tcgemm
