// What a launch tells the kernels of rows.
#pragma once

#include <cstdint>

namespace tcgemm::rows {

inline constexpr int kThreads = 256;

// A thread has kPacks packs of one target's columns, and rows of kUnroll pairs on their way at a time: with
// fewer bytes under way memory is not kept busy, so several packs where targets have few pairs. These have
// kWideLanes threads for a target, which as a constant leaves one address for all packs.
inline constexpr int kWideLanes = 128;

struct SumsParams {
  const void* a;
  const int32_t* indices;
  const int32_t* starts;
  const float* weights;  // null: all 1
  void* d;
  int32_t a_rows, targets, pairs;
  int32_t packs;  // of kCount elements, in a row
  int32_t lanes;  // threads for one target, a power of two
  int32_t column_blocks;
};

struct DotsParams {
  const void* a;
  const void* b;
  const int32_t* indices;
  const int32_t* b_indices;
  float* d;
  int32_t a_rows, b_rows, pairs, packs;
};

}  // namespace tcgemm::rows
