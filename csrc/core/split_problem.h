// Split of an operand into BF16 or TF32 terms, of which products of split-precision emulation are made.
//
//   term 0 = x rounded to the type of D,  term i + 1 = (x - term 0 - .. - term i) rounded
//
// D holds, one after another, the terms that each product takes, the last one term 0; for a complex operand it holds
// two of each, of re and im:
//
//   real         X (outer, middle, columns)         D (outer, terms, depth, pitch)
//   left         X (outer, middle, columns)         D (outer, terms of re and im, depth, pitch)
//   right        X (outer, middle, inner, columns)  D (outer, terms, depth, 2, inner, pitch)
//   right_first  X (outer, middle, inner, columns)  D (outer, 2, middle, terms, depth, pitch)
//
// where the dimension of two has terms of (re, -im), and of (im, re). `depth` is what the dimension after the terms,
// middle or, in the last form, inner, is filled up to by zeros, and `pitch` the same of columns.
//
// An infinity or a NaN is what the last product takes, with zeros before it: elsewhere it would be multiplied by
// numbers of either sign. A finite number stays finite. X and D are packed row-major.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/extent.h"
#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

enum class SplitForm : int32_t { kReal, kLeft, kRight, kRightFirst };
template <>
inline constexpr std::array kNames<SplitForm>{"real", "left", "right", "right_first"};

struct SplitProblem {
  static constexpr int kMaxTerms = 9;
  static constexpr int64_t kAlignment = 16;  // bytes of which rows of D are a multiple

  SplitForm form;
  int64_t outer, middle, inner, columns;
  int64_t depth, pitch;
  std::vector<int64_t> terms;  // the term that each product takes, 0 to 2
  DType in;
  DType out;

  bool is_complex() const { return form != SplitForm::kReal; }
  bool has_component() const { return form == SplitForm::kRight || form == SplitForm::kRightFirst; }
  // The extent that is filled up.
  int64_t filled() const { return form == SplitForm::kRightFirst ? inner : middle; }
  // As D has them.
  int64_t stored_middle() const { return form == SplitForm::kRightFirst ? middle : depth; }
  int64_t stored_inner() const { return form == SplitForm::kRightFirst ? depth : inner; }
  int64_t num_terms() const { return static_cast<int64_t>(terms.size()) * (is_complex() ? 2 : 1); }
  bool is_empty() const { return stored_elements() == 0; }
  int64_t elements() const { return product(outer, middle, inner, columns); }
  // Rows of D that one thread or another goes through: those of one term and component.
  int64_t stored_rows() const { return product(outer, stored_middle(), stored_inner(), 1); }
  int64_t stored_elements() const { return product(stored_rows(), pitch, num_terms(), has_component() ? 2 : 1); }

 private:
  static int64_t product(int64_t a, int64_t b, int64_t c, int64_t d) {
    return multiply_add(multiply_add(multiply_add(a, b, 0), c, 0), d, 0);
  }
};

// See problem.h.
template <typename Visit>
void visit_fields(SplitProblem& p, Visit&& visit) {
  visit("form", p.form);
  visit("outer", p.outer);
  visit("middle", p.middle);
  visit("inner", p.inner);
  visit("columns", p.columns);
  visit("depth", p.depth);
  visit("pitch", p.pitch);
  visit("terms", p.terms);
}

template <typename Visit>
void visit_dtypes(SplitProblem& p, Visit&& visit) {
  visit("x", "in_dtype", p.in);
  visit("d", "out_dtype", p.out);
}

inline Features features_of(const SplitProblem&) { return {}; }

// Addresses of one call.
struct SplitBuffers {
  const void* x = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// The arrays of a call: x -> d.
const BufferTable<SplitProblem, SplitBuffers>& buffer_table(const SplitProblem& problem);

using SplitImplementation = ImplementationOf<SplitProblem, SplitBuffers>;
using SplitImplementations = ImplementationsOf<SplitProblem, SplitBuffers>;

// Empty when extents are in range, terms are valid and dtypes known to some implementation, else the first rule broken.
std::string check_problem(const SplitProblem& problem);

}  // namespace tcgemm
