// One block of D, computed by one thread: what each instruction set provides and host_gemm.cc
// spreads over threads.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace tcgemm::host {

// Rows and columns of one batch item's D, over all of K.
struct Block {
  const void* a;  // the batch item's matrices
  const void* b;
  const void* c;
  void* d;
  int64_t m_begin, m_end;
  int64_t n_begin, n_end;
};

// Blocks are best made of whole register tiles, and at most so large.
struct Geometry {
  int64_t tile_rows, tile_columns;
  int64_t max_rows, max_columns;
};

struct BlockKernels {
  const char* name;
  bool (*runs_here)();
  Geometry (*geometry)(const Problem& problem);
  // Bytes run() needs at a 64-byte aligned address for a block of at most this size.
  int64_t (*scratch_bytes)(const Problem& problem, int64_t m_count, int64_t n_count);
  void (*run)(const Problem& problem, const Block& block, void* scratch);
};

// Each null where the compiler cannot target it.
const BlockKernels* avx512_kernels();
const BlockKernels* avx2_kernels();
const BlockKernels* portable_kernels();  // never null

}  // namespace tcgemm::host
