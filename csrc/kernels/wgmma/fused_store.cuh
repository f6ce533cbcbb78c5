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

// A part: a thread's values of 64 x 32 elements. Number 4 * j + 2 * h + i is that of row warp * 16 + h * 8 +
// lane / 4 and column 8 * j + lane % 4 * 2 + i. As many as a float32 box is wide, as hide the latency of what is
// loaded for them, and as leave registers beside the accumulators.
constexpr int kPart = 16, kPartColumns = 2 * kPart;

// The epilogue of 64 x 64 elements, two parts. What two staged boxes take is stored at a time.
class FusedBox {
 public:
  // (row, column, batch_idx): of the first element. `buffers`: two of 8 KiB, which take turns.
  __device__ __forceinline__ FusedBox(const Params<Fused>& params, int32_t row, int32_t column, int32_t batch_idx,
                                      uint32_t buffers, int& buffer_idx, uint32_t barrier_id, int thread_idx)
      : params_(params),
        f_(params.epilogue.values),
        row_(row),
        column_(column),
        batch_idx_(batch_idx),
        buffers_(buffers),
        buffer_idx_(buffer_idx),
        barrier_id_(barrier_id),
        thread_idx_(thread_idx) {}

  // Stores what becomes of the sums. take(z, part, second, offset) gives a part of them, or of those of a
  // gated product's second matrix, as z = alpha * sum + offset.
  template <typename Take>
  __device__ __forceinline__ void store(Take&& take) const {
    const bool is_float = f_.type == FloatType::kF32, has_aux = f_.aux_out != nullptr;
    // A gated product's aux_out, which is two boxes, then D; else all at once.
#pragma unroll 1
    for (int pass = has_aux && f_.gated ? 0 : 1; pass < 2; ++pass) {
      const bool is_aux = pass == 0, aux_beside_d = !is_aux && has_aux && !f_.gated;
      const bool has_two = is_aux || aux_beside_d || f_.has_two_d();
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        float values[kPart], others[kPart], offset[kPart];
        load_bias(offset, part, 0);
        take(values, part, false, offset);
        if (f_.has_two_z()) {
          load_bias(offset, part, params_.n);
          take(others, part, true, offset);
        }
        if (aux_beside_d) copy(others, values);
        if (!is_aux) compute(values, others, part);
        if (is_float || part == 0) begin_boxes(has_two);
        stage(values, 0, is_float ? 0 : part);
        if (has_two) stage(others, 1, is_float ? 0 : part);
        if (is_float || part == 1) end_boxes(is_aux, has_two, is_float ? part * kPartColumns : 0);
      }
    }
  }

 private:
  __device__ __forceinline__ int32_t thread_row() const { return row_ + thread_idx_ / 32 * 16 + thread_idx_ % 32 / 4; }
  __device__ __forceinline__ int32_t thread_column(int part) const {
    return column_ + thread_idx_ % 4 * 2 + part * kPartColumns;
  }

  static __device__ __forceinline__ void copy(float (&x)[kPart], const float (&y)[kPart]) {
#pragma unroll
    for (int v = 0; v < kPart; ++v) x[v] = y[v];
  }

  // D of a part whose Z is `values` and, of a gated product, `others`; D's second matrix in `others`. All that a
  // part reads is read before anything of it is stored: D may lie in the place of aux_in.
  __device__ __forceinline__ void compute(float (&values)[kPart], float (&others)[kPart], int part) const {
    if (f_.derivative) {
      float saved[kPart];
      copy(others, values);
      load(f_.aux_in, f_.gated, part, [&](bool second, const float (&x)[kPart]) {
        if (second) {
          epilogue::multiply(values, x);
        } else {
          copy(saved, x);
        }
      });
      epilogue::apply_gradient(f_.activation, saved, values);
      epilogue::multiply(others, saved);
    } else {
      epilogue::apply_value(f_.activation, values);
      if (f_.gated) epilogue::multiply(values, others);
    }
    if (f_.beta != 0.0f) {
      load(f_.c, f_.has_two_d(), part, [&](bool second, const float (&x)[kPart]) {
#pragma unroll
        for (int v = 0; v < kPart; ++v) {
          if (second) {
            others[v] += f_.beta * x[v];
          } else {
            values[v] += f_.beta * x[v];
          }
        }
      });
    }
  }

  // Calls visit(second, values) with a part of a matrix with rows of n, or of both of one with rows of two times
  // n; with zeros outside.
  template <typename Visit>
  __device__ __forceinline__ void load(const void* data, bool has_two, int part, Visit visit) const {
    const int64_t ld = static_cast<int64_t>(params_.n) << has_two;
    const int32_t column = thread_column(part), columns = params_.n - column;
    const int64_t offset = (int64_t{batch_idx_} * params_.m + thread_row()) * ld + column;
    float values[kPart];
    if (f_.type == FloatType::kF32) {
      const float* source = static_cast<const float*>(data) + offset;
      load_float(values, source, ld, columns);
      visit(false, values);
      if (!has_two) return;
      load_float(values, source + params_.n, ld, columns);
      visit(true, values);
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
      unpack(values, words[0], f_.type);
      visit(false, values);
      if (!has_two) return;
      unpack(values, words[1], f_.type);
      visit(true, values);
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

  template <int kCount>
  static __device__ __forceinline__ void unpack(float (&values)[kCount], const uint32_t (&words)[kCount / 2],
                                                FloatType type) {
    if (type == FloatType::kBF16) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        values[v] = __uint_as_float(v % 2 == 0 ? words[v / 2] << 16 : words[v / 2] & 0xFFFF0000u);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kCount; v += 2) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[v / 2]));
        values[v] = pair.x, values[v + 1] = pair.y;
      }
    }
  }

  // The bias of a part's elements, of which number `first` is that of column 0.
  __device__ __forceinline__ void load_bias(float (&offset)[kPart], int part, int32_t first) const {
    constexpr int kColumns = kPart / 2;
    float along_n[kColumns] = {}, along_m[2] = {};
    const int64_t batch = batch_idx_ * f_.bias_batch_stride;
    if (f_.bias == nullptr) {
    } else if (f_.bias_along_m) {
      epilogue::visit(f_.bias_type, [&](auto tag) {
        const auto* bias = static_cast<const decltype(tag)*>(f_.bias) + batch + thread_row();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (thread_row() + 8 * h < params_.m) along_m[h] = convert<float>(bias[8 * h]);
        }
      });
    } else {
      const int32_t columns = params_.n - thread_column(part);
      const int64_t place = batch + first + thread_column(part);
      if (f_.bias_type == FloatType::kF32) {
        const float* bias = static_cast<const float*>(f_.bias) + place;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = c / 2 * 8 + c % 2;
          if (column < columns) along_n[c] = bias[column];
        }
      } else {
        uint32_t words[kColumns / 2];
        const uint16_t* bias = static_cast<const uint16_t*>(f_.bias) + place;
        const auto load_words = [&](auto vectors) {
#pragma unroll
          for (int j = 0; j < kColumns / 2; ++j) {
            words[j] = load_pair<vectors.value>(bias + 8 * j, columns - 8 * j);
          }
        };
        if (f_.bias_vectors) {
          load_words(std::true_type{});
        } else {
          load_words(std::false_type{});
        }
        unpack(along_n, words, f_.bias_type);
      }
    }
#pragma unroll
    for (int v = 0; v < kPart; ++v) offset[v] = along_n[v / 4 * 2 + v % 2] + along_m[v / 2 % 2];
  }

  // The buffers of the two boxes being staged, or of the one and the one stored before.
  __device__ __forceinline__ uint32_t buffer(int half) const { return buffers_ + (buffer_idx_ ^ half) * 8192; }

  __device__ __forceinline__ void begin_boxes(bool has_two) const {
    // The stores that this same thread has issued from these buffers have read them.
    if (thread_idx_ == 0) {
      if (has_two) {
        ptx::tma_store_wait_read<0>();
      } else {
        ptx::tma_store_wait_read<1>();
      }
    }
    ptx::named_barrier_sync(barrier_id_, 128);
  }

  // `part`: of a box of 16-bit numbers.
  __device__ __forceinline__ void stage(const float (&values)[kPart], int half, int part) const {
    if (f_.type == FloatType::kF32) {
      // Asked again, lest the compiler keeps eight addresses in registers.
      const int warp = ptx::tid_x() % 128 / 32, lane = ptx::tid_x() % 32;
#pragma unroll
      for (int j = 0; j < kPart / 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = warp * 16 + h * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
          ptx::st_shared_v2_f32(buffer(half) + swizzle<128>(row * 128 + column * 4), values[4 * j + 2 * h],
                                values[4 * j + 2 * h + 1]);
        }
      }
      return;
    }
    const int warp = thread_idx_ / 32, lane = thread_idx_ % 32, row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < kPart / 4; j += 2) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack(values[4 * j + 2 * i], values[4 * j + 2 * i + 1], f_.type);
      const int column = part * kPartColumns + (j + lane / 16) * 8;
      const uint32_t offset = swizzle<128>(row * 128 + column * 2);
      ptx::stmatrix_x4(buffer(half) + offset, r[0], r[1], r[2], r[3]);
    }
  }

  // Stores the staged boxes, `first` columns to the right of the first one: both of aux_out, or D and what is
  // beside it, its second matrix or aux_out.
  __device__ __forceinline__ void end_boxes(bool is_aux, bool has_two, int32_t first) const {
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(barrier_id_, 128);
    const Fused& epilogue = params_.epilogue;
#pragma unroll 1
    for (int half = 0; half <= has_two; ++half) {
      const bool is_d = !is_aux && (half == 0 || f_.has_two_d()), is_second = half == 1 && (is_aux || is_d);
      if (params_.store_with_tma && thread_idx_ == 0) {
        ptx::tma_store_4d(is_d ? &epilogue.d_map : &epilogue.aux_map, buffer(0), column_ + first, is_second, row_,
                          batch_idx_);
        ptx::tma_store_commit();
      }
      if (!params_.store_with_tma || (is_d && epilogue.column_sums != nullptr)) {
        if (f_.type == FloatType::kF32) {
          read_box<4>(is_d, is_second, first);
        } else {
          read_box<2>(is_d, is_second, first);
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
      const int64_t offset = (int64_t{batch_idx_} * params_.m + row_) * ld + int64_t{half} * params_.n + column;
      char* target = static_cast<char*>(is_d ? f_.d : f_.aux_out) + offset * kOutBytes;
      const UnalignedRows<Element, 128> staged{buffer(0), target, ld * kOutBytes,
                                               max(min(columns, 128 / kOutBytes), 0) * kOutBytes};
      staged.template copy<4, 4>(0, true, true, 0, ptx::tid_x() % 128 / 32, min(rows, 64));
    }
    if (is_d && epilogue.column_sums != nullptr && rows > 0) {
      const int64_t row = int64_t{batch_idx_} * epilogue.sum_blocks + row_ / 64;
      float* sums = epilogue.column_sums + ((row << has_two) + half) * params_.n + column;
      sum_box<kOutBytes>(buffer(0), f_.type, sums, rows, columns, ptx::tid_x() % 128);
    }
  }

  const Params<Fused>& params_;
  const epilogue::Fused& f_;
  const int32_t row_, column_, batch_idx_;
  const uint32_t buffers_;
  int& buffer_idx_;
  const uint32_t barrier_id_;
  const int thread_idx_;
};

// Brings to L2, while the product is being multiplied, what the epilogue of a warpgroup's tile will
// read: its loads have few registers to be under way in.
template <typename Config, int kBlocksM>
__device__ __forceinline__ void prefetch_epilogue(const Params<Fused>& params, int32_t m_idx, int32_t n_idx,
                                                  int32_t batch_idx) {
  const epilogue::Fused& f = params.epilogue.values;
  const int64_t element_bytes = f.type == FloatType::kF32 ? 4 : 2;
  const int32_t columns = min(params.epilogue.tile_columns(Config::kTileN), params.n - n_idx);
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
__device__ __forceinline__ void store_fused(const float (&acc)[kBlocksM][Config::kTileN / 2],
                                            const Params<Fused>& params, uint32_t buffers, int& buffer_idx,
                                            int32_t m_idx, int32_t n_idx, int32_t batch_idx, uint32_t barrier_id) {
  static_assert(Config::kTileN % 64 == 0 && !Config::kSwapped, "boxes are 64 columns of D wide");
  constexpr int kPartsN = Config::kTileN / kPartColumns;
  const int32_t columns = params.epilogue.tile_columns(Config::kTileN);
  const float alpha = params.epilogue.values.alpha;
#pragma unroll 1
  for (int block = 0; block < kBlocksM; ++block) {
#pragma unroll 1
    for (int32_t column = 0; column < columns; column += 64) {
      const auto take = [&](float (&z)[kPart], int part, bool second, const float (&offset)[kPart]) {
        const int wanted = block * kPartsN + column / kPartColumns + part + (second ? kPartsN / 2 : 0);
        // Registers have no index that changes.
#pragma unroll
        for (int i = 0; i < kBlocksM * kPartsN; ++i) {
          if (i != wanted) continue;
#pragma unroll
          for (int v = 0; v < kPart; ++v) z[v] = acc[i / kPartsN][i % kPartsN * kPart + v] * alpha + offset[v];
        }
      };
      FusedBox(params, m_idx + block * 64, n_idx + column, batch_idx, buffers, buffer_idx, barrier_id,
               ptx::tid_x() % 128)
          .store(take);
    }
  }
}

}  // namespace tcgemm::wgmma_family
