// The squares on and below the diagonal of a matrix that is its own transpose, walked as a rectangle.
//
// Row i of the rectangle is row side - 1 - i of the triangle and then, as long as what is missing, row i, or row i - 1
// where `side` is odd. Rows that are neighbors in the rectangle are neighbors in the triangle.
#pragma once

#include <cstdint>

namespace tcgemm {

// The rectangle of a matrix that is `side` squares long, in squares.
struct TriangleRectangle {
  int64_t rows, columns;

  __host__ __device__ constexpr static TriangleRectangle make(int64_t side) {
    return {(side + 1) / 2, side + 1 - side % 2};
  }
};

// A tile of the triangle, by its row and its column.
struct TriangleTile {
  int32_t m_idx, n_idx;
  bool is_below;  // the squares on the diagonal

  // The tile at a place in the rectangle; kRows x kColumns tiles are a square.
  template <int32_t kRows, int32_t kColumns>
  __device__ __forceinline__ static TriangleTile at(int32_t m_idx, int32_t n_idx, int32_t side) {
    const int32_t row = m_idx / kRows, column = n_idx / kColumns, first = side - row;
    const bool is_second = column >= first;
    const int32_t above = first - 1;  // mutant: rows_of_the_triangle
    // mutant: rows_of_an_even_side
    const int32_t square_m = is_second ? row - side % 2 : above;
    const int32_t square_n = is_second ? column - first : column;
    // mutant: diagonal_mirrored_alone
    const bool is_below = square_m != square_n;
    return {square_m * kRows + m_idx % kRows, square_n * kColumns + n_idx % kColumns, is_below};
  }
};

}  // namespace tcgemm
