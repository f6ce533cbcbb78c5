// How a module tells Python the type of the state that its calls keep.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// Defines `types` of a module. `State` has a static member `id`, an ffi::TypeId.
template <typename State>
void define_state_type(nanobind::module_& module, const char* name) {
  namespace nb = nanobind;
  module.def(
      "types",
      [name] {
        static const xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<State>();
        nb::dict type;
        type["type_id"] = nb::capsule(reinterpret_cast<void*>(&State::id));
        type["type_info"] = nb::capsule(reinterpret_cast<void*>(const_cast<xla::ffi::TypeInfo*>(&info)));
        nb::dict types;
        types[name] = type;
        return types;
      },
      "Types of the state that calls keep; to be registered before the targets.");
}

}  // namespace tcgemm
