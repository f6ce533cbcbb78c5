// The body of the XLA FFI handler "tcgemm_rows", shared by both platforms.
//
//   operands  sums: a, indices, starts [, weights]; dots: a, b, indices, b_indices
//             indices and starts are int32; weights and a product's result f32, f64 where a is
//   results   d
//   attribute rows                               the dictionary decoded as RowsAttributes
#pragma once

#include <cstdint>
#include <string_view>

#include "core/rows_problem.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// See RowsProblem for what they mean.
struct RowsAttributes {
  int64_t abi;
  std::string_view implementation, config, form;
  int64_t a_rows, b_rows, targets, pairs, n;
  bool weighted;
};

}  // namespace tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::tcgemm::RowsAttributes, StructMember<int64_t>("abi"),
                                      StructMember<std::string_view>("implementation"),
                                      StructMember<std::string_view>("config"), StructMember<std::string_view>("form"),
                                      StructMember<int64_t>("a_rows"), StructMember<int64_t>("b_rows"),
                                      StructMember<int64_t>("targets"), StructMember<int64_t>("pairs"),
                                      StructMember<int64_t>("n"), StructMember<bool>("weighted"));

namespace tcgemm {

// Runs one call. Never throws: every failure is an ffi::Error, InvalidArgument for anything a
// malformed program can cause. Indices and starts are never read here.
xla::ffi::Error run_rows(const RowsImplementations& implementations, const Device& device, void* stream,
                         const RowsAttributes& attributes, xla::ffi::RemainingArgs operands,
                         xla::ffi::RemainingRets results);

}  // namespace tcgemm
