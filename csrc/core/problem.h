// The one description of a matrix product that every implementation takes.
//
//   D[b,m,n] = alpha * sum_k op(A)[b,m,k] * op(B)[b,k,n] + beta * C[b,m,n]
//
// op(X) is X or its transpose, said by Operand::transposed and never by a copy. `Epilogue` says
// what else happens to a sum before it is stored.
// Host-only, free of CUDA and XLA, so that the CPU module and the queries share it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/activation.h"

namespace tcgemm {

enum class DType : int32_t { kF16, kBF16, kF32, kF64, kS8, kU8, kS32, kC64, kC128 };

// How products are formed and accumulated. kTF32 rounds float32 operands to TF32 and
// accumulates in float32; for complex types it speaks of the real components.
enum class Compute : int32_t { kF16, kF32, kTF32, kF64, kS32 };

int64_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);
const char* compute_name(Compute compute);
// False when `name` is not a known name; `out` is then untouched.
bool parse_dtype(std::string_view name, DType* out);
bool parse_compute(std::string_view name, Compute* out);

// A bias has an element for each column (n) or each row (m) of the product.
enum class Bias : int32_t { kNone, kN, kM };
bool parse_bias(std::string_view name, Bias* out);
bool parse_activation(std::string_view name, Activation* out);
std::vector<std::string> activation_names();

// An input matrix for each batch index. Strides are in elements and never negative.
//   A, not transposed: element (m, k) at m * ld + k;  transposed: at k * ld + m.
//   B, not transposed: element (k, n) at k * ld + n;  transposed: at n * ld + k.
// Batch index b adds (b / batch_inner) * batch_outer_stride + (b % batch_inner) * batch_inner_stride;
// a stride of 0 broadcasts.
struct Operand {
  DType dtype;
  bool transposed;
  int64_t ld;
  int64_t batch_outer_stride;
  int64_t batch_inner_stride;
};

// What happens to Z = alpha * op(A) op(B) + bias before it is stored; f is the activation.
//
//   forward            D = f(Z) + beta * C                       aux_out = Z
//   derivative         D = f'(aux_in) * Z + beta * C
//   gated              D = f(Z) * Z_up + beta * C                aux_out = [Z | Z_up]
//   gated, derivative  D = [f'(gate) * up * Z | f(gate) * Z] + beta * C, aux_in = [gate | up]
//
// [x | y] has rows of 2n elements, x first. A gated product has two matrices B of the same layout,
// for Z and for Z_up, and its bias (n only) has 2n elements. aux_in and aux_out have D's dtype.
struct Epilogue {
  Activation activation = Activation::kNone;
  bool derivative = false;
  bool gated = false;
  int64_t up_offset = 0;  // elements from the first B to the second; 0: that is an operand of its own
  Bias bias = Bias::kNone;
  DType bias_dtype = DType::kF32;
  int64_t bias_batch_stride = 0;
  bool aux_out = false;
  // Also the sums over m of D as stored, in float32 (float64 for float64): (batch, columns of D).
  bool column_sums = false;

  bool is_none() const {
    return activation == Activation::kNone && !derivative && !gated && bias == Bias::kNone && !aux_out && !column_sums;
  }
};

struct Problem {
  int64_t batch;        // product of both batch levels
  int64_t batch_inner;  // extent of the inner level; divides batch
  int64_t m, n, k;
  Operand a, b;
  DType out;        // D and C: packed row-major, ld = d_columns(), batch stride = m * d_columns()
  Compute compute;  // accumulator
  double alpha = 1.0;
  double beta = 0.0;  // 0: C is never read
  Epilogue epilogue;

  // The derivative of a gated product multiplies by one matrix B.
  bool has_two_b() const { return epilogue.gated && !epilogue.derivative; }
  int64_t d_columns() const { return epilogue.gated && epilogue.derivative ? 2 * n : n; }
  int64_t aux_columns() const { return epilogue.gated ? 2 * n : n; }
  int64_t bias_columns() const { return has_two_b() ? 2 * n : n; }
  int64_t batch_outer() const { return batch_inner > 0 ? batch / batch_inner : 0; }
  bool is_empty() const { return batch == 0 || m == 0 || n == 0; }
};

// Addresses of one call. `c` is null when beta == 0; `workspace` holds at least the bytes the
// implementation asked for and is 128-byte aligned.
struct Buffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // Of the epilogue; each null unless it asks for it.
  const void* b_up = nullptr;
  const void* bias = nullptr;
  const void* aux_in = nullptr;
  void* aux_out = nullptr;
  void* column_sums = nullptr;
};

// The rules every implementation may rely on: extents and strides are non-negative, leading
// dimensions cover their rows, batch_inner divides batch, and the epilogue makes sense for the
// dtypes. Empty when they hold, else a sentence naming the first one broken.
std::string check_problem(const Problem& problem);

// Elements an operand or a result must hold so that no index of `problem` falls outside it; the
// largest int64 where that does not fit one. B: with up_offset both matrices of a gated product,
// else each of them.
int64_t required_elements_a(const Problem& problem);
int64_t required_elements_b(const Problem& problem);
int64_t required_elements_d(const Problem& problem);
int64_t required_elements_aux(const Problem& problem);
int64_t required_elements_bias(const Problem& problem);
int64_t required_elements_column_sums(const Problem& problem);

// The dtype of column sums, and of what a floating-point product accumulates in.
inline DType sum_dtype(const Problem& problem) { return problem.compute == Compute::kF64 ? DType::kF64 : DType::kF32; }

}  // namespace tcgemm
