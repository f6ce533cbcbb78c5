// What a product's sizes and a tiling decide: the same numbers for a kernel, which is compiled for them, and for its
// launcher, which takes any kernel.
#pragma once

namespace tcgemm::batched {

inline constexpr int kThreads = 128;
inline constexpr int kStages = 2;
inline constexpr int kChunk = 16;  // bytes of a copy

// Sizes that the kernels are for.
inline constexpr int kLeastSize = 2, kMostSize = 32;

constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }
constexpr int larger(int x, int y) { return x > y ? x : y; }

// The matrices of one array: packed in global memory, row after row, and in shared memory with a chunk of padding after
// each row or after each matrix where that avoids bank conflicts.
struct Stored {
  int rows, columns, bytes;  // bytes: of an element
  bool pads_rows, pads_matrices;

  constexpr int matrix_bytes() const { return rows * columns * bytes; }
  constexpr int row_stride() const { return columns + (pads_rows ? kChunk / bytes : 0); }
  constexpr int matrix_stride() const { return rows * row_stride() + (pads_matrices ? kChunk / bytes : 0); }
  // In shared memory, whole chunks.
  constexpr int group_bytes(int matrices) const {
    return ceil_div(matrices * matrix_stride() * bytes, kChunk) * kChunk;
  }
  // The fewest matrices whose bytes are whole chunks.
  constexpr int alignment() const {
    int matrices = 1;
    while (matrices * matrix_bytes() % kChunk != 0) matrices *= 2;
    return matrices;
  }
};

// Paddings of an array, as a template argument.
inline constexpr int kNoPads = 0, kRowPads = 1, kMatrixPads = 2;

// Division of M or N among threads: adjacent threads have adjacent vectors, and a thread has every `threads`-th vector.
struct Side {
  int size, threads, vector;

  constexpr int vectors() const { return size / vector; }
  constexpr int vectors_per_thread() const { return ceil_div(vectors(), threads); }
  constexpr int per_thread() const { return vectors_per_thread() * vector; }
  // Whether every thread has as many.
  constexpr bool is_even() const { return vectors() % threads == 0; }
};

struct Tiling {
  int m, n, k;
  bool a_transposed, b_transposed;
  int in_bytes, out_bytes;
  int lanes;     // neighboring threads that have different matrices
  int matrices;  // of a group, at most
  int m_threads, m_vector, n_threads, n_vector;
  int a_pads, b_pads, d_pads;
  int blocks;  // of an SM, which registers and shared memory leave room for

  constexpr Side m_side() const { return {m, m_threads, m_vector}; }
  constexpr Side n_side() const { return {n, n_threads, n_vector}; }
  constexpr int tiles() const { return m_threads * n_threads; }

  constexpr Stored a() const { return stored(a_transposed ? k : m, a_transposed ? m : k, in_bytes, a_pads); }
  constexpr Stored b() const { return stored(b_transposed ? n : k, b_transposed ? k : n, in_bytes, b_pads); }
  constexpr Stored d() const { return stored(m, n, out_bytes, d_pads); }

  // Elements that are loaded at once along K, of an operand whose rows lie along K.
  constexpr int k_vector() const {
    int vector = 4;
    while (k % vector != 0 || vector * in_bytes > kChunk) vector /= 2;
    return vector;
  }
  constexpr int k_step() const { return !a_transposed || b_transposed ? k_vector() : 1; }

  // Shared memory: stages of A and B, then D.
  constexpr int b_offset() const { return a().group_bytes(matrices); }
  constexpr int stage_bytes() const { return b_offset() + b().group_bytes(matrices); }
  constexpr int d_offset() const { return kStages * stage_bytes(); }
  constexpr int shared_bytes() const { return d_offset() + d().group_bytes(matrices); }

  // The matrices of a group must be a multiple of it, so that each group begins on a chunk in all arrays.
  constexpr int alignment() const { return larger(larger(a().alignment(), b().alignment()), d().alignment()); }

 private:
  static constexpr Stored stored(int rows, int columns, int bytes, int pads) {
    return {rows, columns, bytes, pads == kRowPads, pads == kMatrixPads};
  }
};

}  // namespace tcgemm::batched
