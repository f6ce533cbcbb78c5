// What the _cuda module tells Python about its tensor kernels.
#pragma once

#include "core/fields.h"
#include "kernels/common/reduction.h"
#include "kernels/tensor/transposition.h"
#include "modules/queries.h"

namespace tcgemm {

// The dictionary has the attributes of "tcgemm_transpose" (ffi/tensor_kernels.h) and element_bytes.
inline Transposition transposition_from(const nb::dict& fields) {
  Transposition t{};
  const Query query(fields);
  FieldReader<Query> reader(query);
  reader("element_bytes", t.element_bytes);
  visit_fields(t, reader);
  if (!reader.error().empty()) throw nb::value_error(reader.error().c_str());
  return t;
}

inline void define_tensor_queries(nb::module_& module) {
  module.def(
      "reject_transposition",
      [](nb::dict transposition) { return reject_transposition(transposition_from(transposition)); },
      nb::arg("transposition"), "The rule that stops the transposition kernel; empty when none does.");
  module.def(
      "transposition_kernels",
      [](nb::dict transposition, nb::dict device) {
        return as_tuples({transposition_source(transposition_from(transposition), device_from(device))});
      },
      nb::arg("transposition"), nb::arg("device"), "The kernels that it runs, as kernels() says.");
  const auto reduction_from = [](const std::string& in, const std::string& out, const std::string& op, int64_t outer,
                                 int64_t reduced, int64_t inner) {
    Reduction r{DType::kF32, DType::kF32, op, outer, reduced, inner};
    if (!parse_name(in, &r.in) || !parse_name(out, &r.out)) throw nb::value_error("a dtype is unknown");
    return r;
  };
  module.def(
      "reject_reduction",
      [reduction_from](const std::string& in, const std::string& out, const std::string& op, int64_t outer,
                       int64_t reduced,
                       int64_t inner) { return reject_reduction(reduction_from(in, out, op, outer, reduced, inner)); },
      nb::arg("in_dtype"), nb::arg("out_dtype"), nb::arg("op"), nb::arg("outer"), nb::arg("reduced"), nb::arg("inner"),
      "The rule that stops the reduction kernel; empty when none does.");
  module.def(
      "reduction_workspace_bytes",
      [reduction_from](const std::string& in, const std::string& out, const std::string& op, int64_t outer,
                       int64_t reduced, int64_t inner, int num_sms) {
        return reduction_workspace_bytes(reduction_from(in, out, op, outer, reduced, inner), num_sms);
      },
      nb::arg("in_dtype"), nb::arg("out_dtype"), nb::arg("op"), nb::arg("outer"), nb::arg("reduced"), nb::arg("inner"),
      nb::arg("num_sms"));
  module.def(
      "reduction_kernels",
      [reduction_from](const std::string& in, const std::string& out, const std::string& op, int64_t outer,
                       int64_t reduced, int64_t inner, nb::dict device) {
        return as_tuples(reduction_sources(reduction_from(in, out, op, outer, reduced, inner), device_from(device)));
      },
      nb::arg("in_dtype"), nb::arg("out_dtype"), nb::arg("op"), nb::arg("outer"), nb::arg("reduced"), nb::arg("inner"),
      nb::arg("device"), "The kernels that it runs, as kernels() says.");
}

}  // namespace tcgemm
