// The body of the XLA FFI handler "tcgemm_ragged", shared by both platforms.
//
//   operands  a, b, group_sizes, group_offset [, bias] [, gather]    int32 but for a, b and bias
//   results   d [, workspace]                    workspace: uint8, only when the implementation asks for one
//   attribute ragged                             the dictionary decoded as RaggedAttributes
#pragma once

#include <cstdint>
#include <string_view>

#include "core/ragged_problem.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// See RaggedProblem for what they mean.
struct RaggedAttributes {
  int64_t abi;
  std::string_view implementation, config, form, compute, activation;
  int64_t batch, m, n, k, groups, num_sizes, a_rows;
  bool b_transposed, a_batched, b_batched, sizes_batched, gated, biased, gathered;
};

}  // namespace tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::tcgemm::RaggedAttributes, StructMember<int64_t>("abi"), StructMember<std::string_view>("implementation"),
    StructMember<std::string_view>("config"), StructMember<std::string_view>("form"),
    StructMember<std::string_view>("compute"), StructMember<std::string_view>("activation"),
    StructMember<int64_t>("batch"), StructMember<int64_t>("m"), StructMember<int64_t>("n"), StructMember<int64_t>("k"),
    StructMember<int64_t>("groups"), StructMember<int64_t>("num_sizes"), StructMember<int64_t>("a_rows"),
    StructMember<bool>("b_transposed"), StructMember<bool>("a_batched"), StructMember<bool>("b_batched"),
    StructMember<bool>("sizes_batched"), StructMember<bool>("gated"), StructMember<bool>("biased"),
    StructMember<bool>("gathered"));

namespace tcgemm {

// Runs one call. Never throws: every failure is an ffi::Error, InvalidArgument for anything a
// malformed program can cause. Group sizes are never read here.
xla::ffi::Error run_ragged(const RaggedImplementations& implementations, const Device& device, void* stream,
                           const RaggedAttributes& attributes, xla::ffi::RemainingArgs operands,
                           xla::ffi::RemainingRets results);

}  // namespace tcgemm
