// From a consumer warpgroup's accumulators through an epilogue of core/problem.h to D, aux_out and
// the partial sums of D's columns. The epilogue runs in registers on half of 64 x 64 elements at a time,
// in a rolled loop, so that a kernel holds each of its branches once; results are staged and stored as in
// store.cuh.
//
// A gated product's tile holds columns of both matrices B, the second in its right half: a column of
// Z and the same one of Z_up are in the same thread.
#pragma once

#include <cstdint>

#include "epilogue/fused.cuh"
#include "kernels/wgmma/config.h"
#include "kernels/wgmma/store.cuh"

namespace tcgemm::wgmma_family {

// The epilogue of a kernel that can do all of them.
struct Fused {
  static constexpr bool kFused = true;

  epilogue::Fused values;
  CUtensorMap b_up_map;        // of a gated product
  CUtensorMap d_map, aux_map;  // (column, half, row, batch) of D and of aux_out
  float* column_sums;          // [batch][sum_blocks][columns of D], or null
  int32_t sum_blocks;

  // Columns of the product in a tile.
  template <typename Config>
  __host__ __device__ int32_t tile_columns() const {
    return values.has_two_z() ? Config::kTileN / 2 : Config::kTileN;
  }
};

// A thread's values of 64 x 64 elements: number 4 * j + 2 * h + i is that of row warp * 16 + h * 8 +
// lane / 4 and column 8 * j + lane % 4 * 2 + i. They are worked on in two parts of 32 columns: as many as a
// float32 box is wide, as hide the latency of what is loaded for them, and as leave registers beside the accumulators.
constexpr int kFragment = 32, kPart = 16, kParts = kFragment / kPart, kPartColumns = 2 * kPart;

// The epilogue of 64 x 64 elements.
class FusedFragment {
 public:
  // (row, column, batch_idx): of the first element. `buffers`: two of 8 KiB, which take turns.
  __device__ __forceinline__ FusedFragment(const Params<Fused>& params, int32_t row, int32_t column, int32_t batch_idx,
                                           uint8_t* buffers, int& buffer_idx, uint32_t barrier_id)
      : params_(params),
        f_(params.epilogue.values),
        row_(row),
        column_(column),
        batch_idx_(batch_idx),
        buffers_(buffers),
        buffer_idx_(buffer_idx),
        barrier_id_(barrier_id) {}

  // Stores what becomes of the sums. `up`: those of a gated product's second matrix.
  __device__ __forceinline__ void store(float (&z)[kFragment], float (&up)[kFragment]) const {
    scale(z, up);
    // One loop over all that is stored, so that each part of the code exists once: aux_out, its second
    // matrix, D; of each one part of the columns after the other.
#pragma unroll 1
    for (int step = f_.aux_out != nullptr ? 0 : 2 * kParts; step < 3 * kParts; ++step) {
      const bool is_d = step >= 2 * kParts, is_second = !is_d && step >= kParts;
      const int part = step % kParts;
      if (is_second && !f_.gated) continue;
      const bool has_two = is_d && f_.has_two_d(), is_float = f_.type == FloatType::kF32;
      float values[kPart], others[kPart];  // those of D's second matrix
      select(values, z, part);
      if (is_second) select(values, up, part);
      if (is_d) compute(values, others, z, up, part);
      const bool begins = is_float || part == 0, ends = is_float || part == kParts - 1;
      if (begins) begin_boxes(has_two);
#pragma unroll 1
      for (int half = 0;; ++half) {
        stage(values, half, is_float ? 0 : part);
        if (half == has_two) break;
        copy(values, others);
      }
      if (ends) end_boxes(is_d, is_second, has_two, is_float ? part * kPartColumns : 0);
    }
  }

 private:
  static __device__ __forceinline__ int thread_idx() { return ptx::tid_x() % 128; }
  __device__ __forceinline__ int32_t thread_row() const {
    return row_ + thread_idx() / 32 * 16 + thread_idx() % 32 / 4;
  }
  __device__ __forceinline__ int32_t thread_column() const { return column_ + thread_idx() % 4 * 2; }

  static __device__ __forceinline__ void select(float (&x)[kPart], const float (&y)[kFragment], int part) {
#pragma unroll
    for (int v = 0; v < kPart; ++v) x[v] = part > 0 ? y[kPart + v] : y[v];
  }
  static __device__ __forceinline__ void copy(float (&x)[kPart], const float (&y)[kPart]) {
#pragma unroll
    for (int v = 0; v < kPart; ++v) x[v] = y[v];
  }
  static __device__ __forceinline__ void multiply(float (&x)[kPart], const float (&y)[kPart]) {
#pragma unroll
    for (int v = 0; v < kPart; ++v) x[v] *= y[v];
  }

  // D of a part whose Z is `values`, and its second matrix in `others`. All that a part reads is read before
  // anything of it is stored: D may lie in the place of aux_in.
  __device__ __forceinline__ void compute(float (&values)[kPart], float (&others)[kPart], const float (&z)[kFragment],
                                          const float (&up)[kFragment], int part) const {
    if (f_.derivative) {
      float factor[kPart];
      load(others, factor, f_.aux_in, f_.gated, part);
      if (f_.gated) multiply(values, factor);
      epilogue::apply_gradient(f_.activation, others, values);
      select(factor, z, part);
      multiply(others, factor);
    } else {
      epilogue::apply_value(f_.activation, values);
      if (f_.gated) {
        select(others, up, part);
        multiply(values, others);
      }
    }
    if (f_.beta != 0.0f) {
      float first[kPart], second[kPart];
      load(first, second, f_.c, f_.has_two_d(), part);
#pragma unroll
      for (int v = 0; v < kPart; ++v) {
        values[v] += f_.beta * first[v];
        others[v] += f_.beta * second[v];
      }
    }
  }

  // A part of a matrix with rows of n, or of both of one with rows of two times n; zeros outside.
  __device__ __forceinline__ void load(float (&first)[kPart], float (&second)[kPart], const void* data, bool has_two,
                                       int part) const {
    const int64_t ld = static_cast<int64_t>(params_.n) << has_two;
    const int32_t column = thread_column() + part * kPartColumns, columns = params_.n - column;
    const int64_t offset = (int64_t{batch_idx_} * params_.m + thread_row()) * ld + column;
    if (f_.type == FloatType::kF32) {
      const float* source = static_cast<const float*>(data) + offset;
      load_float(first, source, ld, columns);
      load_float(second, source + params_.n, ld, has_two ? columns : 0);
    } else {
      // Both are under way before either is used.
      uint32_t words[2][kPart / 2];
      const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
      if (f_.vectors) {
        load_16bit<true>(words[0], source, ld, columns);
        load_16bit<true>(words[1], source + params_.n, ld, has_two ? columns : 0);
      } else {
        load_16bit<false>(words[0], source, ld, columns);
        load_16bit<false>(words[1], source + params_.n, ld, has_two ? columns : 0);
      }
      unpack(first, words[0], f_.type);
      unpack(second, words[1], f_.type);
    }
  }

  // Calls visit(pair, address, columns from there on) for each of a thread's pairs of elements. What it loads must
  // be predicated, not branched around, so that no load waits for another one.
  template <typename T, typename Visit>
  __device__ __forceinline__ void visit_pairs(const T* source, int64_t ld, int32_t columns, Visit visit) const {
    const int32_t rows = params_.m - thread_row();
#pragma unroll
    for (int pair = 0; pair < kPart / 2; ++pair) {
      const int h = pair % 2, column = pair / 2 * 8;
      visit(pair, source + 8 * h * ld + column, 8 * h < rows ? columns - column : 0);
    }
  }
  __device__ __forceinline__ void load_float(float (&values)[kPart], const float* source, int64_t ld,
                                             int32_t columns) const {
    visit_pairs(source, ld, columns, [&](int pair, const float* from, int32_t count) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[2 * pair + i] = 0.0f;
        if (i < count) values[2 * pair + i] = from[i];
      }
    });
  }
  template <bool kVectors>
  __device__ __forceinline__ void load_16bit(uint32_t (&words)[kPart / 2], const uint16_t* source, int64_t ld,
                                             int32_t columns) const {
    visit_pairs(source, ld, columns,
                [&](int pair, const uint16_t* from, int32_t count) { words[pair] = load_pair<kVectors>(from, count); });
  }
  // The first two of `count` elements, 0 for those that are not there.
  template <bool kVectors>
  static __device__ __forceinline__ uint32_t load_pair(const uint16_t* from, int32_t count) {
    uint32_t low = 0, high = 0;
    if constexpr (kVectors) {
      if (count > 0) low = *reinterpret_cast<const uint32_t*>(from);
    } else {
      if (count > 0) low = from[0];
      if (count > 1) high = from[1];
    }
    return low | high << 16;
  }

  static __device__ __forceinline__ void unpack(float (&values)[16], const uint32_t (&words)[8], FloatType type) {
    if (type == FloatType::kBF16) {
#pragma unroll
      for (int v = 0; v < 16; ++v) {
        values[v] = __uint_as_float(v % 2 == 0 ? words[v / 2] << 16 : words[v / 2] & 0xFFFF0000u);
      }
    } else {
#pragma unroll
      for (int v = 0; v < 16; v += 2) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[v / 2]));
        values[v] = pair.x, values[v + 1] = pair.y;
      }
    }
  }

  // z = alpha * z + bias, and so for the second matrix of a gated product.
  __device__ __forceinline__ void scale(float (&z)[kFragment], float (&up)[kFragment]) const {
    float along_n[2][16] = {}, along_m[2] = {};
    if (f_.bias != nullptr) load_bias(along_n, along_m);
#pragma unroll
    for (int v = 0; v < kFragment; ++v) z[v] = z[v] * f_.alpha + (along_n[0][v / 4 * 2 + v % 2] + along_m[v / 2 % 2]);
    if (!f_.has_two_z()) return;
#pragma unroll
    for (int v = 0; v < kFragment; ++v) up[v] = up[v] * f_.alpha + along_n[1][v / 4 * 2 + v % 2];
  }

  // Of a thread's 16 columns, for the two matrices of a gated product, or of its two rows.
  __device__ __forceinline__ void load_bias(float (&along_n)[2][16], float (&along_m)[2]) const {
    const int64_t first = batch_idx_ * f_.bias_batch_stride;
    if (f_.bias_along_m) {
      epilogue::visit(f_.bias_type, [&](auto tag) {
        const auto* bias = static_cast<const decltype(tag)*>(f_.bias) + first + thread_row();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (thread_row() + 8 * h < params_.m) along_m[h] = convert<float>(bias[8 * h]);
        }
      });
      return;
    }
    const int32_t columns = params_.n - thread_column(), up_columns = f_.has_two_z() ? columns : 0;
    const int64_t offset = first + thread_column();
    if (f_.bias_type == FloatType::kF32) {
      const float* bias = static_cast<const float*>(f_.bias) + offset;
#pragma unroll
      for (int v = 0; v < 16; ++v) {
        const int column = v / 2 * 8 + v % 2;
        if (column < columns) along_n[0][v] = bias[column];
        if (column < up_columns) along_n[1][v] = bias[params_.n + column];
      }
      return;
    }
    uint32_t words[2][8];
    const uint16_t* bias = static_cast<const uint16_t*>(f_.bias) + offset;
    const auto load_words = [&](auto vectors) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        words[0][j] = load_pair<vectors.value>(bias + 8 * j, columns - 8 * j);
        words[1][j] = load_pair<vectors.value>(bias + params_.n + 8 * j, up_columns - 8 * j);
      }
    };
    if (f_.bias_vectors) {
      load_words(std::true_type{});
    } else {
      load_words(std::false_type{});
    }
    unpack(along_n[0], words[0], f_.bias_type);
    unpack(along_n[1], words[1], f_.bias_type);
  }

  // The buffer of the box being staged, or of the one beside it, D's second matrix.
  __device__ __forceinline__ uint8_t* buffer(int half) const { return buffers_ + (buffer_idx_ ^ half) * 8192; }

  __device__ __forceinline__ void begin_boxes(bool has_two) const {
    // The stores that this same thread has issued from these buffers have read them.
    if (thread_idx() == 0) {
      if (has_two) {
        ptx::tma_store_wait_read<0>();
      } else {
        ptx::tma_store_wait_read<1>();
      }
    }
    ptx::named_barrier_sync(barrier_id_, 128);
  }

  __device__ __forceinline__ void stage(const float (&values)[kPart], int half, int part) const {
    const int warp = thread_idx() / 32, lane = thread_idx() % 32;
    if (f_.type == FloatType::kF32) {
#pragma unroll
      for (int j = 0; j < kPart / 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = warp * 16 + h * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(buffer(half) + swizzle<128>(row * 128 + column * 4)) =
              make_float2(values[4 * j + 2 * h], values[4 * j + 2 * h + 1]);
        }
      }
      return;
    }
    const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < kPart / 4; j += 2) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack(values[4 * j + 2 * i], values[4 * j + 2 * i + 1], f_.type);
      const int column = part * kPartColumns + (j + lane / 16) * 8;
      const uint32_t offset = swizzle<128>(row * 128 + column * 2);
      ptx::stmatrix_x4(ptx::shared_address(buffer(half)) + offset, r[0], r[1], r[2], r[3]);
    }
  }

  // Stores the staged boxes, `first` columns to the right of the fragment's first: of aux_out or its second
  // matrix, or of D, of which there may be two.
  __device__ __forceinline__ void end_boxes(bool is_d, bool is_second, bool has_two, int32_t first) const {
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier_id_, 128);
#pragma unroll 1
    for (int half = 0; half <= has_two; ++half) {
      const Fused& epilogue = params_.epilogue;
      if (params_.store_with_tma && thread_idx() == 0) {
        ptx::tma_store_4d(is_d ? &epilogue.d_map : &epilogue.aux_map, buffer(0), column_ + first, is_second || half,
                          row_, batch_idx_);
        ptx::tma_store_commit();
      }
      if (!params_.store_with_tma || (is_d && epilogue.column_sums != nullptr)) {
        if (f_.type == FloatType::kF32) {
          read_box<4>(is_d, is_second || half, first);
        } else {
          read_box<2>(is_d, is_second || half, first);
        }
      }
      buffer_idx_ ^= 1;
    }
  }

  // What the threads do with a staged box: store it where TMA cannot, and add up its columns.
  template <int kOutBytes>
  __device__ __forceinline__ void read_box(bool is_d, int32_t half, int32_t first) const {
    const Fused& epilogue = params_.epilogue;
    const int32_t column = column_ + first, rows = params_.m - row_, columns = params_.n - column;
    const bool has_two = is_d ? f_.has_two_d() : f_.gated;
    if (!params_.store_with_tma) {
      using Element = std::conditional_t<kOutBytes == 2, uint16_t, float>;
      const int64_t ld = static_cast<int64_t>(params_.n) << has_two;
      Element* target = static_cast<Element*>(is_d ? f_.d : f_.aux_out) +
                        (int64_t{batch_idx_} * params_.m + row_) * ld + int64_t{half} * params_.n + column;
      copy_box<128, 64>(buffer(0), LeftBox{}, true, target, ld, rows, columns, thread_idx());
    }
    if (is_d && epilogue.column_sums != nullptr && rows > 0) {
      const int64_t row = int64_t{batch_idx_} * epilogue.sum_blocks + row_ / 64;
      float* sums = epilogue.column_sums + ((row << has_two) + half) * params_.n + column;
      sum_box<kOutBytes>(buffer(0), f_.type, sums, rows, columns, thread_idx());
    }
  }

  const Params<Fused>& params_;
  const epilogue::Fused& f_;
  const int32_t row_, column_, batch_idx_;
  uint8_t* const buffers_;
  int& buffer_idx_;
  const uint32_t barrier_id_;
};

// Brings to L2, while the product is being multiplied, what the epilogue of a warpgroup's tile will
// read: its loads have few registers to be under way in.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void prefetch_epilogue(const Params<Fused>& params, int32_t m_idx, int32_t n_idx,
                                                  int32_t batch_idx) {
  const epilogue::Fused& f = params.epilogue.values;
  const int64_t element_bytes = f.type == FloatType::kF32 ? 4 : 2;
  const int32_t columns = min(params.epilogue.tile_columns<Config>(), params.n - n_idx);
  const auto prefetch = [&](const void* matrix, bool has_two) {
    for (int32_t row = m_idx + ptx::tid_x() % 128; row < min(m_idx + kBlocksM * 64, params.m); row += 128) {
      const int64_t first = ((int64_t{batch_idx} * params.m + row) * params.n << has_two) + n_idx;
      for (int half = 0; half <= has_two; ++half) {
        const char* line = static_cast<const char*>(matrix) + (first + int64_t{half} * params.n) * element_bytes;
        for (int32_t byte = 0; byte < columns * element_bytes; byte += 128) ptx::prefetch_global_l2(line + byte);
      }
    }
  };
  if (f.derivative) prefetch(f.aux_in, f.gated);
  if (f.beta != 0.0f) prefetch(f.c, f.has_two_d());
}

// All of a warpgroup's accumulators. (m_idx, n_idx): element of the product that the first one is.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void store_fused(float (&acc)[kBlocksM][Config::kTileN / 2], const Params<Fused>& params,
                                            uint8_t* buffers, int& buffer_idx, int32_t m_idx, int32_t n_idx,
                                            int32_t batch_idx, uint32_t barrier_id) {
  static_assert(Config::kTileN % 64 == 0 && !Config::kSwapped, "fragments are 64 columns of D wide");
  constexpr int kBlockValues = Config::kTileN / 2, kValues = kBlocksM * kBlockValues;
  float (&values)[kValues] = reinterpret_cast<float (&)[kValues]>(acc);
  // The values move down as they are used up: registers have no index that changes.
  const auto drop = [&](auto count) {
#pragma unroll
    for (int v = 0; v + count.value < kValues; ++v) values[v] = values[v + count.value];
  };
  const bool has_two_z = params.epilogue.values.has_two_z();
  const int32_t columns = params.epilogue.tile_columns<Config>();
#pragma unroll 1
  for (int32_t row = 0; row < kBlocksM * 64; row += 64) {
#pragma unroll 1
    for (int32_t column = 0; column < columns; column += 64) {
      constexpr int kUp = kBlockValues >= 64 ? kBlockValues / 2 : 0;
      FusedFragment(params, m_idx + row, n_idx + column, batch_idx, buffers, buffer_idx, barrier_id)
          .store(reinterpret_cast<float (&)[kFragment]>(values[0]),
                 reinterpret_cast<float (&)[kFragment]>(values[kUp]));
      drop(std::integral_constant<int, kFragment>{});
    }
    // What is left of the block: the second matrix's half.
    if (has_two_z && kBlocksM > 1) drop(std::integral_constant<int, kBlockValues / 2>{});
  }
}

}  // namespace tcgemm::wgmma_family
