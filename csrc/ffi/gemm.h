// The body of the XLA FFI handler "tcgemm_gemm", shared by both platforms: decode the
// attributes, check them against the buffers, find the implementation, launch it.
//
//   operands  a, b [, b_up] [, c] [, bias] [, aux_in]
//     b_up    of a gated product, unless up_offset finds it inside b
//     c       same shape and dtype as d; needed when beta != 0, never read otherwise
//     bias    when `bias` is not "none"; aux_in: when `derivative`, of d's dtype
//   results   d [, aux_out] [, column_sums] [, workspace]
//     workspace: uint8, only when the implementation asks for one
//   attribute gemm              the dictionary decoded as GemmAttributes
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/implementation.h"
#include "core/problem.h"
#include "ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

struct GemmAttributes {
  int64_t abi;
  std::string_view implementation, config, compute;
  int64_t batch, batch_inner, m, n, k;
  bool a_transposed, b_transposed;
  int64_t a_ld, a_outer_stride, a_inner_stride;
  int64_t b_ld, b_outer_stride, b_inner_stride;
  double alpha, beta;
  // The members of Epilogue in core/problem.h but bias_dtype, which the buffer says.
  std::string_view activation, bias;
  bool derivative, gated, aux_out, column_sums;
  int64_t up_offset, bias_batch_stride;
};

}  // namespace tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::tcgemm::GemmAttributes, StructMember<int64_t>("abi"), StructMember<std::string_view>("implementation"),
    StructMember<std::string_view>("config"), StructMember<std::string_view>("compute"), StructMember<int64_t>("batch"),
    StructMember<int64_t>("batch_inner"), StructMember<int64_t>("m"), StructMember<int64_t>("n"),
    StructMember<int64_t>("k"), StructMember<bool>("a_transposed"), StructMember<bool>("b_transposed"),
    StructMember<int64_t>("a_ld"), StructMember<int64_t>("a_outer_stride"), StructMember<int64_t>("a_inner_stride"),
    StructMember<int64_t>("b_ld"), StructMember<int64_t>("b_outer_stride"), StructMember<int64_t>("b_inner_stride"),
    StructMember<double>("alpha"), StructMember<double>("beta"), StructMember<std::string_view>("activation"),
    StructMember<std::string_view>("bias"), StructMember<bool>("derivative"), StructMember<bool>("gated"),
    StructMember<bool>("aux_out"), StructMember<bool>("column_sums"), StructMember<int64_t>("up_offset"),
    StructMember<int64_t>("bias_batch_stride"));

namespace tcgemm {

// Runs one call. Never throws: every failure is an ffi::Error, InvalidArgument for anything a
// malformed program can cause.
xla::ffi::Error run_gemm(const Implementations& implementations, const Device& device, void* stream,
                         const GemmAttributes& attributes, xla::ffi::RemainingArgs operands,
                         xla::ffi::RemainingRets results);

}  // namespace tcgemm
