// What tensor-core fragments hold: see fragment_probe.h.
#pragma once

#include <mma.h>

#include <cstdint>
#include <type_traits>

#include "ptx/mma.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wmma {

using namespace nvcuda::wmma;

template <typename T>
inline constexpr bool kIsInteger =
    std::is_same_v<T, int8_t> || std::is_same_v<T, uint8_t> || std::is_same_v<T, int32_t>;

template <typename T>
__device__ T from_int(int32_t x) {
  if constexpr (kIsInteger<T>) return static_cast<T>(x);
  return convert<T>(static_cast<float>(x));
}

template <typename T>
__device__ int32_t to_int(T x) {
  if constexpr (kIsInteger<T>) return static_cast<int32_t>(x);
  return static_cast<int32_t>(convert<float>(x));
}

// Loads the number of each element into the fragment, as two digits of base 256, which every element type represents
// exactly; `out` has the numbers of the elements that each lane holds.
template <typename Fragment, typename T, typename Load>
__device__ void probe(int rows, int cols, bool column_major, int32_t* out, const Load& load) {
  __shared__ __align__(32) T matrix[512];
  Fragment fragment;
  const int lane = threadIdx.x;
  for (int i = 0; i < fragment.num_elements; ++i) out[lane * fragment.num_elements + i] = 0;
  for (int digit = 0; digit < 2; ++digit) {
    for (int i = lane; i < rows * cols; i += 32) {
      const int row = i / cols, col = i % cols;
      matrix[column_major ? col * rows + row : i] = from_int<T>(i >> (8 * digit) & 255);
    }
    __syncwarp();
    load(fragment, matrix, column_major ? rows : cols);
    for (int i = 0; i < fragment.num_elements; ++i) {
      out[lane * fragment.num_elements + i] += (to_int(fragment.x[i]) & 255) << (8 * digit);
    }
    __syncwarp();
  }
}

// kElements: elements of a lane; `out` has room for as many.
template <int kM, int kN, int kK, typename Element, typename T, bool kIsA, int kElements>
__global__ void probe_operand(bool column_major, int32_t* out) {
  using Fragment = fragment<std::conditional_t<kIsA, matrix_a, matrix_b>, kM, kN, kK, Element, row_major>;
  static_assert(Fragment::num_elements == kElements, "out has room for the elements of each lane");
  const auto load = [](auto& fragment, const T* matrix, unsigned ld) { load_matrix_sync(fragment, matrix, ld); };
  if constexpr (kIsA) {
    if (column_major) {
      probe<fragment<matrix_a, kM, kN, kK, Element, col_major>, T>(kM, kK, true, out, load);
    } else {
      probe<fragment<matrix_a, kM, kN, kK, Element, row_major>, T>(kM, kK, false, out, load);
    }
  } else if (column_major) {
    probe<fragment<matrix_b, kM, kN, kK, Element, col_major>, T>(kK, kN, true, out, load);
  } else {
    probe<fragment<matrix_b, kM, kN, kK, Element, row_major>, T>(kK, kN, false, out, load);
  }
}

template <int kM, int kN, int kK, typename Acc, int kElements>
__global__ void probe_accumulator(bool column_major, int32_t* out) {
  static_assert(fragment<accumulator, kM, kN, kK, Acc>::num_elements == kElements,
                "out has room for the elements of each lane");
  const auto load = [&](auto& fragment, const Acc* matrix, unsigned ld) {
    load_matrix_sync(fragment, matrix, ld, column_major ? mem_col_major : mem_row_major);
  };
  probe<fragment<accumulator, kM, kN, kK, Acc>, Acc>(kM, kN, column_major, out, load);
}

enum class Mma { kF16, kF16F16, kBF16, kTF32, kS8, kU8 };

// Element i of a lane's fragment is element i % kPerRegister of register i / kPerRegister.
template <typename T>
__device__ uint32_t pack(const int32_t* elements) {
  constexpr int kPerRegister = 4 / sizeof(T);
  union {
    uint32_t bits;
    T values[kPerRegister];
  } word;
  word.bits = 0;
  for (int i = 0; i < kPerRegister; ++i) word.values[i] = from_int<T>(elements[i]);
  return word.bits;
}

template <Mma kMma, typename T>
__global__ void fragment_mma(const int32_t* a, const int32_t* b, int32_t* d) {
  constexpr int kPerRegister = 4 / sizeof(T);
  const int lane = threadIdx.x;
  uint32_t a_regs[4], b_regs[2];
  for (int i = 0; i < 4; ++i) a_regs[i] = pack<T>(a + (lane * 4 + i) * kPerRegister);
  for (int i = 0; i < 2; ++i) b_regs[i] = pack<T>(b + (lane * 2 + i) * kPerRegister);
  if constexpr (kMma == Mma::kF16F16) {
    union {
      uint32_t bits[2];
      uint16_t halves[4];
    } acc{};
    ptx::mma_m16n8k16_f16_f16(acc.bits, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to_int(__ushort_as_half(acc.halves[i]));
  } else {
    std::conditional_t<kIsInteger<T>, int32_t, float> acc[4] = {};
    if constexpr (kMma == Mma::kF16)
      ptx::mma_m16n8k16_f32_f16(acc, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    if constexpr (kMma == Mma::kBF16)
      ptx::mma_m16n8k16_f32_bf16(acc, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    if constexpr (kMma == Mma::kTF32)
      ptx::mma_m16n8k8_f32_tf32(acc, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    if constexpr (kMma == Mma::kS8)
      ptx::mma_m16n8k32_s32_s8(acc, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    if constexpr (kMma == Mma::kU8)
      ptx::mma_m16n8k32_s32_u8(acc, a_regs[0], a_regs[1], a_regs[2], a_regs[3], b_regs[0], b_regs[1]);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to_int(acc[i]);
  }
}

}  // namespace tcgemm::wmma
