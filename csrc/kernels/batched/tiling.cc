// Estimates the clocks of an SM that each tiling takes for a matrix, and chooses the lowest.
#include "kernels/batched/tiling.h"

#include <algorithm>
#include <array>

namespace tcgemm::batched {
namespace {

// Bytes of A and B of one stage: what is aimed at, and the most. Two stages in each of several CTAs keep more than the
// 40 KB of loads in flight that an SM of an H100 needs.
constexpr int kStageBytes = 12 * 1024, kMostStageBytes = 20 * 1024;
// Shared memory that every GPU from sm_80 on gives to a block, and that of an SM of sm_90.
constexpr int kMostSharedBytes = 99 * 1024, kSharedBytesPerSm = 227 * 1024;
constexpr int kMostBlocks = 8, kRegisters = 65536;
// Accumulators of a thread, and its registers beside accumulators and operands, in words.
constexpr int kMostAccumulators = 32, kOtherRegisters = 40;
// Bytes of memory for each clock of an SM, at 80 % of the bandwidth of an H200.
constexpr double kBytesPerClock = 16;
// Active warps on an SM that hide the latency of shared memory.
constexpr int kEnoughWarps = 16;

struct Arithmetic {
  double fma_clocks;  // of a warp
  int fmas;           // instructions of a multiply-add
  bool converts;
};

Arithmetic arithmetic_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0.5, 1, false};
    case DType::kC64: return {1.0, 4, false};
    case DType::kC128: return {2.0, 4, false};
    case DType::kF16:
    case DType::kBF16: return {0.25, 1, true};
    default: return {0.25, 1, false};
  }
}

// Lanes with a tile: its matrix, and its place.
struct Lane {
  int matrix, m, n;
};

// Wavefronts of one access of a warp to shared memory, of `bytes` each at address(lane): an access of 8 or 16 bytes is
// made for a half or a quarter of the lanes at a time.
template <typename Address>
int wavefronts(const Lane* lanes, int count, int bytes, const Address& address) {
  const int phase_lanes = bytes <= 4 ? 32 : 128 / bytes;
  int sum = 0;
  for (int begin = 0; begin < count; begin += phase_lanes) {
    std::array<std::array<int, 32>, 32> words;
    std::array<int, 32> counts{};
    for (int i = begin; i < std::min(count, begin + phase_lanes); ++i) {
      const int first = address(lanes[i]);
      for (int word = first / 4; word * 4 < first + bytes; ++word) {
        auto& held = words[word % 32];
        int& size = counts[word % 32];
        if (std::find(held.begin(), held.begin() + size, word) == held.begin() + size) held[size++] = word;
      }
    }
    sum += *std::max_element(counts.begin(), counts.end());
  }
  return sum;
}

// Of all accesses that a warp makes to one array for its tiles.
struct Access {
  int count, bytes;
};

class Estimate {
 public:
  Estimate(const Tiling& tiling, const Arithmetic& arithmetic) : t_(tiling), arithmetic_(arithmetic) {
    const int all = t_.matrices * t_.tiles();
    num_warps_ = ceil_div(all, 32);
    // A few warps stand for all, for their places repeat.
    for (int warp = 0; warp < std::min(num_warps_, kSampled); ++warp) {
      for (int i = warp * 32; i < std::min(all, warp * 32 + 32); ++i) {
        const int others = i / t_.lanes, tile = others % t_.tiles();
        lanes_[warp][num_lanes_[warp]++] = {others / t_.tiles() * t_.lanes + i % t_.lanes, tile / t_.n_threads,
                                            tile % t_.n_threads};
      }
    }
  }

  // Wavefronts of a warp for A, B or D, whose padding is told.
  double of_a(const Stored& a) const { return of_operand(a, !t_.a_transposed, t_.m_side(), &Lane::m); }
  double of_b(const Stored& b) const { return of_operand(b, t_.b_transposed, t_.n_side(), &Lane::n); }
  double of_d(const Stored& d) const {
    return stores() * average(t_.n_vector * t_.out_bytes, [&](const Lane& lane) {
             return (lane.matrix * d.matrix_stride() + lane.m * t_.m_vector * d.row_stride() + lane.n * t_.n_vector) *
                    d.bytes;
           });
  }

  // Clocks of an SM for each matrix, with so many wavefronts of a warp.
  double clocks(double wavefronts) const {
    const int m = t_.m_side().per_thread(), n = t_.n_side().per_thread();
    const double fma = m * n * t_.k * arithmetic_.fma_clocks;
    const double conversions = arithmetic_.converts ? (m + n) * t_.k : 0;
    const double instructions = m * n * t_.k * arithmetic_.fmas + conversions + loads(!t_.a_transposed, t_.m_side()) +
                                loads(t_.b_transposed, t_.n_side()) + stores() + kOverhead;
    const std::array<double, 4> units{fma, 0.5 * conversions, 0.25 * instructions, wavefronts};
    const double longest = *std::max_element(units.begin(), units.end());
    const double sum = fma + 0.5 * conversions + wavefronts;
    const int active = t_.blocks * std::min(num_warps_, kThreads / 32);
    const double exposed = std::max(1.0, static_cast<double>(kEnoughWarps) / active);
    const double multiplying = num_warps_ * (longest + 0.2 * (sum - longest)) * exposed / t_.matrices;
    // Copies overlap the products of other blocks, if not quite.
    const double copying = (t_.a().matrix_bytes() + t_.b().matrix_bytes() + t_.d().matrix_bytes()) / kBytesPerClock;
    return std::max(multiplying, copying) + kNotOverlapped * multiplying;
  }

 private:
  static constexpr int kSampled = 4;
  static constexpr double kNotOverlapped = 0.3;
  static constexpr double kOverhead = 24;  // instructions of a tile that neither load nor multiply

  int loads(bool along_k, const Side& side) const {
    return along_k ? side.per_thread() * (t_.k / t_.k_vector()) : side.vectors_per_thread() * t_.k;
  }
  int stores() const { return t_.m_side().per_thread() * t_.n_side().vectors_per_thread(); }

  double of_operand(const Stored& x, bool along_k, const Side& side, int Lane::* place) const {
    const int across = along_k ? x.row_stride() : 1;
    const int bytes = (along_k ? t_.k_vector() : side.vector) * x.bytes;
    return loads(along_k, side) * average(bytes, [&](const Lane& lane) {
             return (lane.matrix * x.matrix_stride() + lane.*place * side.vector * across) * x.bytes;
           });
  }

  template <typename Address>
  double average(int bytes, const Address& address) const {
    int sum = 0;
    const int sampled = std::min(num_warps_, kSampled);
    for (int warp = 0; warp < sampled; ++warp) sum += wavefronts(lanes_[warp], num_lanes_[warp], bytes, address);
    return static_cast<double>(sum) / sampled;
  }

  const Tiling& t_;
  const Arithmetic arithmetic_;
  int num_warps_;
  Lane lanes_[kSampled][32];
  int num_lanes_[kSampled] = {};
};

// Tries each padding of one array, whose layout `stored` returns, and keeps the one with the fewest wavefronts (bank
// conflicts). Returns their number.
template <typename Form, typename Wavefronts>
double choose_pads(int* pads, const Form& stored, const Wavefronts& wavefronts_of) {
  double least = 0;
  int best = -1;
  for (const int kind : {kNoPads, kMatrixPads, kRowPads}) {
    *pads = kind;
    const Stored x = stored();
    if (kind == kRowPads && x.columns * x.bytes % kChunk != 0) continue;
    if (kind == kMatrixPads && x.matrix_bytes() % kChunk != 0) continue;
    const double wavefronts = wavefronts_of(x);
    if (best < 0 || wavefronts < least) {
      best = kind;
      least = wavefronts;
    }
  }
  *pads = best;
  return least;
}

int accumulator_words(const Tiling& t) { return larger(t.in_bytes, 4) / 4; }

// Sets the number of CTAs per SM. Returns false if there is none, or a thread would have too many accumulators, or a
// CTA too much shared memory.
bool set_occupancy(Tiling* t) {
  const int m = t->m_side().per_thread(), n = t->n_side().per_thread();
  if (m * n * accumulator_words(*t) > kMostAccumulators) return false;
  if (t->shared_bytes() > kMostSharedBytes) return false;
  const int operands = (m + n) * t->k_step() * accumulator_words(*t);
  const int registers = m * n * accumulator_words(*t) + operands + kOtherRegisters;
  t->blocks =
      std::min({kSharedBytesPerSm / (t->shared_bytes() + 1024), kRegisters / (kThreads * registers), kMostBlocks});
  return t->blocks > 0;
}

// Sets the number of matrices of a stage. Returns false if they exceed kMostStageBytes and lanes are interleaved.
bool set_matrices(Tiling* t) {
  const int unit = std::max(t->alignment(), t->lanes);  // both are powers of two
  const int bytes = t->a().matrix_bytes() + t->b().matrix_bytes();
  t->matrices = std::max(kStageBytes / bytes / unit, 1) * unit;
  return t->matrices * bytes <= kMostStageBytes || t->lanes == 1;
}

template <typename Visit>
void visit_sides(int size, int most_vector, const Visit& visit) {
  for (int vector = 1; vector <= most_vector && size % vector == 0; vector *= 2) {
    int last = 0;
    for (int count = 1; count * vector <= 8 && count <= size / vector; ++count) {
      const int threads = ceil_div(size / vector, count);
      if (threads != last) visit(threads, vector);
      last = threads;
    }
  }
}

}  // namespace

Tiling choose_tiling(const Problem& p) {
  Tiling t{};
  t.m = static_cast<int>(p.m);
  t.n = static_cast<int>(p.n);
  t.k = static_cast<int>(p.k);
  t.a_transposed = p.a.transposed;
  t.b_transposed = p.b.transposed;
  t.in_bytes = static_cast<int>(dtype_bytes(p.a.dtype));
  t.out_bytes = static_cast<int>(dtype_bytes(p.out));
  const Arithmetic arithmetic = arithmetic_of(p.a.dtype);
  const int most_vector = std::min(4, kChunk / larger(t.in_bytes, t.out_bytes));
  Tiling best{};
  double least = 0;
  for (t.lanes = 1; t.lanes <= 32; t.lanes *= 2) {
    if (!set_matrices(&t)) continue;
    visit_sides(t.m, t.a_transposed ? most_vector : 1, [&](int m_threads, int m_vector) {
      visit_sides(t.n, most_vector, [&](int n_threads, int n_vector) {
        t.m_threads = m_threads, t.m_vector = m_vector, t.n_threads = n_threads, t.n_vector = n_vector;
        t.a_pads = t.b_pads = t.d_pads = kNoPads;
        if (!set_occupancy(&t)) return;
        const Estimate estimate(t, arithmetic);
        double wavefronts =
            choose_pads(&t.a_pads, [&] { return t.a(); }, [&](const Stored& x) { return estimate.of_a(x); });
        wavefronts += choose_pads(&t.b_pads, [&] { return t.b(); }, [&](const Stored& x) { return estimate.of_b(x); });
        wavefronts += choose_pads(&t.d_pads, [&] { return t.d(); }, [&](const Stored& x) { return estimate.of_d(x); });
        if (!set_occupancy(&t)) return;
        const double clocks = estimate.clocks(wavefronts);
        if (best.blocks == 0 || clocks < least) {
          best = t;
          least = clocks;
        }
      });
    });
  }
  return best;
}

}  // namespace tcgemm::batched
