// The body of the XLA FFI handler "tcgemm_blas", shared by both platforms.
//
//   operands  [a...] [b...] [c...] [alpha, beta]    as core/blas.h says for the routine; items of each
//   results   result... [, workspace]               c's successors, in its place; or one element for
//                                                   each batch entry
//   attribute blas                                  the dictionary decoded as BlasAttributes
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/blas.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

struct BlasAttributes {
  int64_t abi;
  std::string_view implementation, config, routine, op_a, op_b, math;
  int64_t batch, items, m, n, k, kl, ku;
  int64_t a_ld, a_stride, b_ld, b_stride, c_ld, c_stride;
  bool upper, right, unit, has_c, scalar_args, atomics;
  double alpha_re, alpha_im, beta_re, beta_im;
};

}  // namespace tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::tcgemm::BlasAttributes, StructMember<int64_t>("abi"), StructMember<std::string_view>("implementation"),
    StructMember<std::string_view>("config"), StructMember<std::string_view>("routine"),
    StructMember<std::string_view>("op_a"), StructMember<std::string_view>("op_b"),
    StructMember<std::string_view>("math"), StructMember<int64_t>("batch"), StructMember<int64_t>("items"),
    StructMember<int64_t>("m"), StructMember<int64_t>("n"), StructMember<int64_t>("k"), StructMember<int64_t>("kl"),
    StructMember<int64_t>("ku"), StructMember<int64_t>("a_ld"), StructMember<int64_t>("a_stride"),
    StructMember<int64_t>("b_ld"), StructMember<int64_t>("b_stride"), StructMember<int64_t>("c_ld"),
    StructMember<int64_t>("c_stride"), StructMember<bool>("upper"), StructMember<bool>("right"),
    StructMember<bool>("unit"), StructMember<bool>("has_c"), StructMember<bool>("scalar_args"),
    StructMember<bool>("atomics"), StructMember<double>("alpha_re"), StructMember<double>("alpha_im"),
    StructMember<double>("beta_re"), StructMember<double>("beta_im"));

namespace tcgemm {

// The problem that the attributes describe, but for its dtype, which stays; "" or what is wrong with them.
std::string read_problem(const BlasAttributes& attributes, blas::Problem* problem);

// Runs one call; see run_gemm().
xla::ffi::Error run_blas(const blas::Implementations& implementations, const Device& device, void* stream,
                         const BlasAttributes& attributes, xla::ffi::RemainingArgs operands,
                         xla::ffi::RemainingRets results);

}  // namespace tcgemm
