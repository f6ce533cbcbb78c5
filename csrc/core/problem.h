// The one description of a matrix product that every implementation takes.
//
//   D[b,m,n] = alpha * sum_k op(A)[b,m,k] * op(B)[b,k,n] + beta * C[b,m,n]
//
// op(X) is X or its transpose, said by Operand::transposed and never by a copy.
// Host-only, free of CUDA and XLA, so that the CPU module and the queries share it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

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

struct Problem {
  int64_t batch;        // product of both batch levels
  int64_t batch_inner;  // extent of the inner level; divides batch
  int64_t m, n, k;
  Operand a, b;
  DType out;        // D and C: packed row-major, ld = n, batch stride = m * n
  Compute compute;  // accumulator
  double alpha = 1.0;
  double beta = 0.0;  // 0: C is never read

  int64_t batch_outer() const { return batch_inner > 0 ? batch / batch_inner : 0; }
  bool is_empty() const { return batch == 0 || m == 0 || n == 0; }
};

// Addresses of one call. `c` is null when beta == 0; `workspace` holds at least the bytes the
// implementation asked for and is 128-byte aligned.
struct Buffers {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  void* workspace;
  int64_t workspace_bytes;
};

// The rules every implementation may rely on: extents and strides are non-negative, leading
// dimensions cover their rows, and batch_inner divides batch. Empty when they hold, else a
// sentence naming the first one broken.
std::string check_problem(const Problem& problem);

// Elements an operand, or D, must hold so that no index of `problem` falls outside it; the largest
// int64 where that does not fit one.
int64_t required_elements_a(const Problem& problem);
int64_t required_elements_b(const Problem& problem);
int64_t required_elements_d(const Problem& problem);

}  // namespace tcgemm
