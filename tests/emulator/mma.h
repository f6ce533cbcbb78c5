// Stands in for CUDA's mma.h: fragments and what is done with them. Where a fragment has which element is WMMA's own
// affair, so here it is none of the layouts that hardware has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "instructions.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32;
}

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
  using element_type = std::conditional_t<std::is_same_v<T, precision::tf32>, float, T>;

  static constexpr bool kIsTF32 = std::is_same_v<T, precision::tf32>;
  static constexpr int kRows = std::is_same_v<Use, matrix_b> ? k : m;
  static constexpr int kColumns = std::is_same_v<Use, matrix_a> ? k : n;
  static constexpr int num_elements = kRows * kColumns / 32;
  element_type x[num_elements];

  // Calls visit(row, column, element) for those of all lanes.
  template <typename Visit>
  static void visit(fragment* const (&lanes)[32], const Visit& visit) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < num_elements; ++i) {
        const int place = (lane + 32 * i) * 37 % (kRows * kColumns);
        visit(place / kColumns, place % kColumns, lanes[lane]->x[i]);
      }
    }
  }
};

template <typename Fragment, typename T>
void fill_fragment(Fragment& fragment, const T& value) {
  for (auto& x : fragment.x) x = value;
}

// All lanes call it of the same matrix.
template <bool kIsRowMajor, typename Fragment, typename T, typename Access>
void visit_in_memory(Fragment& fragment, T* matrix, unsigned ld, const Access& access) {
  struct Call {
    Fragment* fragment;
    T* matrix;
    unsigned ld;
  } call{&fragment, matrix, ld};
  // Of rows, 32 bytes, or as many as they have.
  constexpr int kLength = kIsRowMajor ? Fragment::kColumns : Fragment::kRows;
  constexpr uintptr_t kAlignment = kLength * sizeof(T) < 32 ? kLength * sizeof(T) : 32;
  if (reinterpret_cast<uintptr_t>(matrix) % kAlignment != 0 || ld * sizeof(T) % 16 != 0) {
    emulator::fail("WMMA of a matrix that is not aligned");
  }
  emulator::meet("WMMA's access to memory", ~0u, &call, [=](void** calls) {
    Fragment* lanes[32];
    for (int lane = 0; lane < 32; ++lane) {
      const Call& other = *static_cast<Call*>(calls[lane]);
      if (other.matrix != matrix || other.ld != ld) emulator::fail("WMMA of a matrix that is not that of all lanes");
      lanes[lane] = other.fragment;
    }
    Fragment::visit(lanes, [&](int row, int column, auto& x) {
      access(x, matrix[kIsRowMajor ? int64_t{row} * ld + column : int64_t{column} * ld + row]);
    });
  });
}

template <typename Use, int m, int n, int k, typename T, typename Layout, typename Stored>
void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& fragment, const Stored* matrix, unsigned ld) {
  visit_in_memory<std::is_same_v<Layout, row_major>>(fragment, matrix, ld, [](auto& x, const Stored& y) { x = y; });
}

template <int m, int n, int k, typename T>
void store_matrix_sync(T* matrix, const fragment<accumulator, m, n, k, T>& fragment, unsigned ld, layout_t layout) {
  if (layout != mem_row_major) emulator::fail("WMMA's store by columns, which is not emulated");
  auto held = fragment;
  visit_in_memory<true>(held, matrix, ld, [](const T& x, T& y) { y = x; });
}

inline float __float_to_tf32(float x) {
  return emulator::to_float(emulator::Format::kTF32, emulator::round_to_tf32(__float_as_uint(x)));
}

// What products of elements are added up as.
template <typename Acc>
using Sum =
    std::conditional_t<std::is_same_v<Acc, __half>, float, std::conditional_t<std::is_same_v<Acc, int>, int64_t, Acc>>;

template <typename Fragment>
auto multiplied(const typename Fragment::element_type& x) {
  if constexpr (Fragment::kIsTF32) {
    return emulator::to_float(emulator::Format::kTF32, __float_as_uint(x));
  } else if constexpr (sizeof(x) == 1) {
    return static_cast<int64_t>(x);
  } else if constexpr (sizeof(x) == 2) {
    return static_cast<float>(x);
  } else {
    return x;
  }
}

template <typename C, typename A, typename B>
void mma_sync(C& d, const A& a, const B& b, const C& c, bool saturates = false) {
  using Acc = typename C::element_type;
  struct Call {
    A a;
    B b;
    C c;
    C* d;
  } call{a, b, c, &d};
  emulator::meet("WMMA's product", ~0u, &call, [=](void** calls) {
    A* all_a[32];
    B* all_b[32];
    C *all_c[32], *all_d[32];
    for (int lane = 0; lane < 32; ++lane) {
      auto* of_lane = static_cast<Call*>(calls[lane]);
      all_a[lane] = &of_lane->a;
      all_b[lane] = &of_lane->b;
      all_c[lane] = &of_lane->c;
      all_d[lane] = of_lane->d;
    }
    constexpr int kM = A::kRows, kN = B::kColumns, kK = A::kColumns;
    Sum<Acc> left[kM][kK], right[kK][kN], sums[kM][kN];
    A::visit(all_a, [&](int row, int column, auto& x) { left[row][column] = multiplied<A>(x); });
    B::visit(all_b, [&](int row, int column, auto& x) { right[row][column] = multiplied<B>(x); });
    C::visit(all_c, [&](int row, int column, auto& x) { sums[row][column] = x; });
    for (int i = 0; i < kM; ++i) {
      for (int j = 0; j < kN; ++j) {
        for (int l = 0; l < kK; ++l) sums[i][j] += left[i][l] * right[l][j];
        if constexpr (std::is_same_v<Acc, int>) {
          using Limits = std::numeric_limits<int32_t>;
          if (saturates) sums[i][j] = std::min<int64_t>(std::max<int64_t>(sums[i][j], Limits::min()), Limits::max());
        }
      }
    }
    C::visit(all_d, [&](int row, int column, auto& x) { x = static_cast<Acc>(sums[row][column]); });
  });
}

}  // namespace nvcuda::wmma
