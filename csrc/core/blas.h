// The one description of a BLAS call that cuBLAS and the host implementation take.
//
// Everything is row-major and counts elements, as the caller's arrays lie in memory; an
// implementation over a column-major library passes the transposed problem, never moved data.
// Host-only, free of CUDA and XLA.
#pragma once

#include <array>
#include <complex>
#include <cstdint>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {
namespace blas {

//              a         b        c, in place           result
enum class Routine : int32_t {
  kIamax,  //   x                                        index of the first largest |re| + |im|, from 1
  kIamin,  //   x                                        index of the first smallest, from 1
  kAsum,   //   x                                        sum |re| + |im|
  kNrm2,   //   x                                        sqrt(sum |x|^2)
  kDot,    //   x         y                              sum op(x) y, op a conjugation where op_a = C
  kScal,   //                      x                     alpha x
  kAxpy,   //   x                  y                     alpha x + y
  kSwap,   //                      x, y (two items)      y, x; their increments are c.ld and b.ld
  kGemv,   //   A m x n   x        y                     alpha op(A) x + beta y
  kGbmv,   //   A m x n   x        y                     the same; row i of A: its columns i - kl to i + ku
  kTrsv,   //   A m x m            b                     op(A)^-1 b
  kTrsm,   //   A         -        B m x n               alpha op(A)^-1 B or alpha B op(A)^-1
  kGemm,   //   A         B        C m x n               alpha op(A) op(B) + beta C, for each item
};

enum class Op : int32_t { kN, kT, kC };
enum class Math : int32_t { kDefault, kTF32, kPedantic, kNoReducedPrecision };

}  // namespace blas

template <>
inline constexpr std::array kNames<blas::Routine>{"iamax", "iamin", "asum", "nrm2", "dot",  "scal", "axpy",
                                                  "swap",  "gemv",  "gbmv", "trsv", "trsm", "gemm"};
template <>
inline constexpr std::array kNames<blas::Op>{"N", "T", "C"};
template <>
inline constexpr std::array kNames<blas::Math>{"default", "tf32", "pedantic", "no_reduced_precision"};

namespace blas {

// A vector's increment or a matrix' leading dimension, and the distance of batch entries; 0
// broadcasts.
struct Layout {
  int64_t ld = 1;
  int64_t batch_stride = 0;
};

struct Problem {
  Routine routine = Routine::kIamax;
  DType dtype = DType::kF32;     // of all vectors and matrices
  int64_t batch = 1, items = 1;  // items: arrays of each name, for gemm as many products
  int64_t m = 1, n = 1, k = 1;   // n alone is the length of level 1's vectors; not used: 1
  int64_t kl = 0, ku = 0;
  Op op_a = Op::kN, op_b = Op::kN;
  bool upper = false, right = false, unit = false;
  Layout a, b, c;
  std::complex<double> alpha{1}, beta{0};
  bool has_c = false;        // c is given; else it is written only, and beta counts as 0
  bool scalar_args = false;  // alpha and beta are arrays on the device, and those above not used
  Math math = Math::kDefault;
  bool atomics = false;

  bool is_empty() const { return false; }  // Extents are at least 1.
};

// What a routine has: arrays named a and b, one updated in place, scalars.
bool has_a(Routine routine);
bool has_b(Routine routine);
bool has_alpha(Routine routine);
bool has_beta(Routine routine);
bool has_result_like_c(Routine routine);

// See problem.h.
template <typename Visit>
void visit_fields(Problem& p, Visit&& visit) {
  visit("routine", p.routine);
  visit("batch", p.batch);
  visit("items", p.items);
  visit("m", p.m);
  visit("n", p.n);
  visit("k", p.k);
  visit("kl", p.kl);
  visit("ku", p.ku);
  visit("op_a", p.op_a);
  visit("op_b", p.op_b);
  visit("upper", p.upper);
  visit("right", p.right);
  visit("unit", p.unit);
  visit("a_ld", p.a.ld);
  visit("a_stride", p.a.batch_stride);
  visit("b_ld", p.b.ld);
  visit("b_stride", p.b.batch_stride);
  visit("c_ld", p.c.ld);
  visit("c_stride", p.c.batch_stride);
  visit("has_c", p.has_c);
  visit("scalar_args", p.scalar_args);
  visit("math", p.math);
  visit("atomics", p.atomics);
  double parts[]{p.alpha.real(), p.alpha.imag(), p.beta.real(), p.beta.imag()};
  visit("alpha_re", parts[0]);
  visit("alpha_im", parts[1]);
  visit("beta_re", parts[2]);
  visit("beta_im", parts[3]);
  p.alpha = {parts[0], parts[1]};
  p.beta = {parts[2], parts[3]};
}

template <typename Visit>
void visit_dtypes(Problem& p, Visit&& visit) {
  visit(has_a(p.routine) ? "a" : "c", "dtype", p.dtype);
}

inline Features features_of(const Problem& p) {
  Features needed;
  needed.add(Feature::kAlpha, p.alpha != 1.0);
  needed.add(Feature::kBeta, p.beta != 0.0);
  needed.add(Feature::kScalarArgs, p.scalar_args);
  needed.add(Feature::kItems, p.items != 1);
  return needed;
}

// One address for each item. `d` has the shape of c, or holds one element for each batch entry.
struct Buffers {
  std::vector<const void*> a, b, c;
  std::vector<void*> d;
  std::vector<int64_t> c_bytes;  // of each c, and of the d in its place: what lies beyond the elements is passed on
  const void* alpha = nullptr;
  const void* beta = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

bool is_complex(DType dtype);
DType real_dtype(DType dtype);   // of asum and nrm2
DType scale_dtype(DType dtype);  // of alpha and beta: float32 for half types

// The arrays of a call: [a...] [b...] [c...] [alpha, beta] -> d..., items of each; d replaces c, or has one element
// for each batch entry.
const BufferTable<Problem, Buffers>& buffer_table(const Problem& problem);

// Empty when extents (at least 1), strides and flags make sense, else the rule broken first. Then what the
// routine does not have is at its default, and every element of a result comes from the product or from c.
std::string check_problem(const Problem& problem);

// Elements that an array must hold; `b` is also the layout of swap's second vector.
int64_t required_elements_a(const Problem& problem);
int64_t required_elements_b(const Problem& problem);
int64_t required_elements_c(const Problem& problem);
inline int64_t order_of_a(const Problem& p) { return p.right ? p.n : p.m; }  // trsm

// Makes the batch one larger problem where it can be: vectors that follow each other in memory,
// right-hand sides of one matrix. Arrays change their places with what they are in that problem.
void fold_batch(Problem* problem, Buffers* buffers);

// "gemv f32 N, batch=2 m=3 n=4, ..." for messages.
std::string describe(const Problem& problem);

using Implementation = ImplementationOf<Problem, Buffers>;
using Implementations = ImplementationsOf<Problem, Buffers>;

}  // namespace blas
}  // namespace tcgemm
