#include <cuda_runtime.h>
#include <mma.h>

#include <string>
#include <type_traits>

#include "core/cuda_status.h"
#include "kernels/wmma/fragment_probe.h"
#include "ptx/mma.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wmma {
namespace {

using namespace nvcuda::wmma;

template <typename T>
__device__ T from_int(int32_t x) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(x);
  return convert<T>(static_cast<float>(x));
}

template <typename T>
__device__ int32_t to_int(T x) {
  if constexpr (std::is_integral_v<T>) return static_cast<int32_t>(x);
  return static_cast<int32_t>(convert<float>(x));
}

// Numbers go through the fragment in base 256, which every element type holds exactly.
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

template <int kM, int kN, int kK, typename Element, typename T>
__global__ void probe_operand(bool is_a, bool column_major, int32_t* out) {
  const auto load = [](auto& fragment, const T* matrix, unsigned ld) { load_matrix_sync(fragment, matrix, ld); };
  if (is_a) {
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

template <int kM, int kN, int kK, typename Acc>
__global__ void probe_accumulator(bool column_major, int32_t* out) {
  const auto load = [&](auto& fragment, const Acc* matrix, unsigned ld) {
    load_matrix_sync(fragment, matrix, ld, column_major ? mem_col_major : mem_row_major);
  };
  probe<fragment<accumulator, kM, kN, kK, Acc>, Acc>(kM, kN, column_major, out, load);
}

template <int kM, int kN, int kK, typename Element, typename T = Element>
Status launch_operand(std::string_view operand, bool column_major, int32_t* out, int64_t out_elements,
                      cudaStream_t stream) {
  constexpr int kSizeA = fragment<matrix_a, kM, kN, kK, Element, row_major>::num_elements;
  constexpr int kSizeB = fragment<matrix_b, kM, kN, kK, Element, row_major>::num_elements;
  const int size = operand == "a" ? kSizeA : kSizeB;
  if (out_elements != 32 * size) return Status::invalid("out must hold 32 x " + std::to_string(size) + " elements");
  probe_operand<kM, kN, kK, Element, T><<<1, 32, 0, stream>>>(operand == "a", column_major, out);
  return launch_status("fragment_probe");
}

template <int kM, int kN, int kK, typename Acc>
Status launch_accumulator(bool column_major, int32_t* out, int64_t out_elements, cudaStream_t stream) {
  constexpr int kSize = fragment<accumulator, kM, kN, kK, Acc>::num_elements;
  if (out_elements != 32 * kSize) return Status::invalid("out must hold 32 x " + std::to_string(kSize) + " elements");
  probe_accumulator<kM, kN, kK, Acc><<<1, 32, 0, stream>>>(column_major, out);
  return launch_status("fragment_probe");
}

// The shapes of 16- and 8-bit elements.
template <int kM, int kN>
Status launch_k16(std::string_view dtype, std::string_view operand, bool column_major, int32_t* out,
                  int64_t out_elements, cudaStream_t stream) {
  if (operand == "c") {
    if (dtype == "f16") return launch_accumulator<kM, kN, 16, __half>(column_major, out, out_elements, stream);
    if (dtype == "f32") return launch_accumulator<kM, kN, 16, float>(column_major, out, out_elements, stream);
    if (dtype == "s32") return launch_accumulator<kM, kN, 16, int>(column_major, out, out_elements, stream);
  } else {
    if (dtype == "f16") return launch_operand<kM, kN, 16, __half>(operand, column_major, out, out_elements, stream);
    if (dtype == "bf16") {
      return launch_operand<kM, kN, 16, __nv_bfloat16>(operand, column_major, out, out_elements, stream);
    }
    if (dtype == "s8") return launch_operand<kM, kN, 16, int8_t>(operand, column_major, out, out_elements, stream);
    if (dtype == "u8") return launch_operand<kM, kN, 16, uint8_t>(operand, column_major, out, out_elements, stream);
  }
  return Status::invalid("dtype is unknown for this shape");
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
  uint32_t x[4], y[2];
  for (int i = 0; i < 4; ++i) x[i] = pack<T>(a + (lane * 4 + i) * kPerRegister);
  for (int i = 0; i < 2; ++i) y[i] = pack<T>(b + (lane * 2 + i) * kPerRegister);
  if constexpr (kMma == Mma::kF16F16) {
    union {
      uint32_t bits[2];
      uint16_t halves[4];
    } acc{};
    ptx::mma_m16n8k16_f16_f16(acc.bits, x[0], x[1], x[2], x[3], y[0], y[1]);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to_int(__ushort_as_half(acc.halves[i]));
  } else {
    std::conditional_t<std::is_integral_v<T>, int32_t, float> acc[4] = {};
    if constexpr (kMma == Mma::kF16) ptx::mma_m16n8k16_f32_f16(acc, x[0], x[1], x[2], x[3], y[0], y[1]);
    if constexpr (kMma == Mma::kBF16) ptx::mma_m16n8k16_f32_bf16(acc, x[0], x[1], x[2], x[3], y[0], y[1]);
    if constexpr (kMma == Mma::kTF32) ptx::mma_m16n8k8_f32_tf32(acc, x[0], x[1], x[2], x[3], y[0], y[1]);
    if constexpr (kMma == Mma::kS8) ptx::mma_m16n8k32_s32_s8(acc, x[0], x[1], x[2], x[3], y[0], y[1]);
    if constexpr (kMma == Mma::kU8) ptx::mma_m16n8k32_s32_u8(acc, x[0], x[1], x[2], x[3], y[0], y[1]);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = to_int(acc[i]);
  }
}

template <Mma kMma, typename T>
Status launch_mma(const FragmentBuffers& buffers, void* stream) {
  constexpr int64_t kPerRegister = 4 / sizeof(T);
  if (buffers.a_elements != 32 * 4 * kPerRegister || buffers.b_elements != 32 * 2 * kPerRegister ||
      buffers.d_elements != 32 * 4) {
    return Status::invalid("a, b and d must hold 32 fragments each");
  }
  fragment_mma<kMma, T><<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(buffers.a, buffers.b, buffers.d);
  return launch_status("fragment_mma");
}

}  // namespace

Status launch_fragment_probe(std::string_view shape, std::string_view dtype, std::string_view operand,
                             bool column_major, int32_t* out, int64_t out_elements, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (operand != "a" && operand != "b" && operand != "c") return Status::invalid("operand must be a, b or c");
  const bool is_c = operand == "c";
  if (shape == "m16n16k16") return launch_k16<16, 16>(dtype, operand, column_major, out, out_elements, stream);
  if (shape == "m32n8k16") return launch_k16<32, 8>(dtype, operand, column_major, out, out_elements, stream);
  if (shape == "m8n32k16") return launch_k16<8, 32>(dtype, operand, column_major, out, out_elements, stream);
  if (shape == "m16n16k8" && dtype == (is_c ? "f32" : "tf32")) {
    return is_c ? launch_accumulator<16, 16, 8, float>(column_major, out, out_elements, stream)
                : launch_operand<16, 16, 8, precision::tf32, float>(operand, column_major, out, out_elements, stream);
  }
  if (shape == "m8n8k4" && dtype == "f64") {
    return is_c ? launch_accumulator<8, 8, 4, double>(column_major, out, out_elements, stream)
                : launch_operand<8, 8, 4, double>(operand, column_major, out, out_elements, stream);
  }
  return Status::invalid("shape is not one of WMMA's, or has no such dtype");
}

Status launch_fragment_mma(std::string_view shape, std::string_view dtype, std::string_view accumulator,
                           const FragmentBuffers& buffers, void* stream) {
  const bool is_integer = dtype == "s8" || dtype == "u8";
  if (accumulator != (is_integer ? "s32" : "f32") && !(dtype == "f16" && accumulator == "f16")) {
    return Status::invalid("accumulator must be f32, or f16 of f16, or s32 of integers");
  }
  if (shape == "m16n8k16" && dtype == "f16") {
    return accumulator == "f16" ? launch_mma<Mma::kF16F16, __half>(buffers, stream)
                                : launch_mma<Mma::kF16, __half>(buffers, stream);
  }
  if (shape == "m16n8k16" && dtype == "bf16") return launch_mma<Mma::kBF16, __nv_bfloat16>(buffers, stream);
  if (shape == "m16n8k8" && dtype == "tf32") return launch_mma<Mma::kTF32, float>(buffers, stream);
  if (shape == "m16n8k32" && dtype == "s8") return launch_mma<Mma::kS8, int8_t>(buffers, stream);
  if (shape == "m16n8k32" && dtype == "u8") return launch_mma<Mma::kU8, uint8_t>(buffers, stream);
  return Status::invalid("shape is not one of mma.sync's, or has no such dtype");
}

}  // namespace tcgemm::wmma
