// What the instructions of csrc/ptx do; the headers in ptx/ call these.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstring>

#include "machine.h"
#include "ptx/types.cuh"

namespace emulator {

// Element types of matrix instructions -------------------------------------------------------------

enum class Format { kF16, kBF16, kTF32, kS8, kU8, kE4M3, kE5M2 };

template <typename T>
constexpr Format format_of() {
  if constexpr (std::is_same_v<T, __half>) return Format::kF16;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return Format::kBF16;
  if constexpr (std::is_same_v<T, tcgemm::ptx::E4M3>) return Format::kE4M3;
  if constexpr (std::is_same_v<T, tcgemm::ptx::E5M2>) return Format::kE5M2;
  if constexpr (std::is_same_v<T, int8_t>) return Format::kS8;
  if constexpr (std::is_same_v<T, uint8_t>) return Format::kU8;
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, tcgemm::ptx::E4M3> ||
                std::is_same_v<T, tcgemm::ptx::E5M2> || std::is_same_v<T, tcgemm::ptx::TF32> ||
                std::is_same_v<T, int8_t> || std::is_same_v<T, uint8_t>);
  return Format::kTF32;
}
inline int bytes_of(Format format) { return format == Format::kTF32 ? 4 : format >= Format::kS8 ? 1 : 2; }

// The value in the low bits; the tensor core ignores the low 13 bits of a float32.
float to_float(Format format, uint32_t bits);
// To nearest, ties to even.
uint32_t round_to_tf32(uint32_t bits);

// Barriers in shared memory ------------------------------------------------------------------------

void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, uint32_t bytes);
void mbarrier_wait(uint32_t address, uint32_t parity);
void mbarrier_complete(Block& block, uint32_t offset, uint32_t bytes);

// Clusters -----------------------------------------------------------------------------------------

uint32_t map_to_block(uint32_t address, uint32_t rank);
// At any time.
void write_remotely(std::function<void()> write);
// Stores to global memory that other blocks wait for; a release follows all stores of the block to other devices.
void store_flag(uint32_t* address, uint32_t value);
void release_flag(uint64_t* address, uint64_t value);
// A load that waits for any such store if the thread has just loaded from there.
uint64_t poll_flag(const uint64_t* address);
// 16 bytes, which a barrier of the same block counts.
void store_async(uint32_t address, std::array<float, 4> values, uint32_t barrier);
void cluster_arrive();
void cluster_wait();
// A warpgroup's share of the registers its block was launched with.
// Of `blocks` on an SM.
void set_registers(int count, bool is_increase, int blocks);

// Copies and matrix instructions of a warp ---------------------------------------------------------

// The first `valid` of so many bytes, and zeros after them.
void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t valid);
// An arrival once the thread's copies are complete.
void cp_async_arrive(uint32_t barrier);
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, bool transposed);
void stmatrix_x4(uint32_t address, std::array<uint32_t, 4> r, bool transposed);
// Registers of A, then of B.
void mma(Format a, Format b, float (&d)[4], std::array<uint32_t, 6> operands);
void mma(Format a, Format b, int32_t (&d)[4], std::array<uint32_t, 6> operands);

// wgmma --------------------------------------------------------------------------------------------

struct WgmmaShape {
  Format a, b;
  int n;
  bool trans_a, trans_b, a_in_registers;
  uint64_t desc_a, desc_b;
  bool accumulate;
};
void wgmma(const WgmmaShape& shape, float* d, const uint32_t* a);
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace emulator
