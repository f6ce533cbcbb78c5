#include "core/blas.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/extent.h"

namespace tcgemm::blas {
namespace {

struct Shape {
  int64_t rows, columns;  // a vector is a column
};

Shape shape_of_a(const Problem& p) {
  switch (p.routine) {
    case Routine::kGemv: return {p.m, p.n};
    case Routine::kGbmv: return {p.m, p.kl + p.ku + 1};
    case Routine::kTrsv: return {p.m, p.m};
    case Routine::kTrsm: return {order_of_a(p), order_of_a(p)};
    case Routine::kGemm: return p.op_a == Op::kN ? Shape{p.m, p.k} : Shape{p.k, p.m};
    default: return {p.n, 1};
  }
}

Shape shape_of_b(const Problem& p) {
  switch (p.routine) {
    case Routine::kGemv:
    case Routine::kGbmv: return {p.op_a == Op::kN ? p.n : p.m, 1};
    case Routine::kGemm: return p.op_b == Op::kN ? Shape{p.k, p.n} : Shape{p.n, p.k};
    default: return {p.n, 1};
  }
}

Shape shape_of_c(const Problem& p) {
  switch (p.routine) {
    case Routine::kGemv:
    case Routine::kGbmv: return {p.op_a == Op::kN ? p.m : p.n, 1};
    case Routine::kTrsv: return {p.m, 1};
    case Routine::kTrsm:
    case Routine::kGemm: return {p.m, p.n};
    default: return {p.n, 1};
  }
}

int64_t required(const Problem& p, const Layout& x, Shape shape) {
  return multiply_add(p.batch - 1, x.batch_stride, multiply_add(shape.rows - 1, x.ld, shape.columns));
}

std::string check_layout(const char* name, const Layout& x, Shape shape) {
  constexpr int64_t kMaxStride = (int64_t{1} << 31) - 1;
  const int64_t least = std::max<int64_t>(1, shape.columns);
  if (x.ld < least || x.ld > kMaxStride) {
    return must(std::string(name) + "_ld", "be in [" + std::to_string(least) + ", 2147483647]", x.ld);
  }
  if (x.batch_stride < 0) return must(std::string(name) + "_stride", "not be negative", x.batch_stride);
  // Over a batch the buffer bears it out; else its bytes must fit all the same.
  if (x.batch_stride >= int64_t{1} << 59)
    return must(std::string(name) + "_stride", "be less than 2^59", x.batch_stride);
  return "";
}

// Where every element of a result comes from: entries of a batch do not overlap, and what lies between
// elements is passed on from c.
std::string check_written(const Problem& p, const char* name, const Layout& x, Shape shape) {
  const int64_t entry = multiply_add(shape.rows - 1, x.ld, shape.columns);
  if (p.batch > 1 && x.batch_stride < entry) {
    return must(std::string(name) + "_stride", "be at least " + std::to_string(entry) + " over a batch",
                x.batch_stride);
  }
  const bool has_gaps = (shape.rows > 1 && x.ld != shape.columns) || (p.batch > 1 && x.batch_stride != entry);
  return has_gaps && !p.has_c ? "c must be given where its layout leaves gaps" : "";
}

// What a routine does not have is left as it is by default, so that no implementation need know that it is not used.
std::string check_unused(const Problem& p) {
  const Routine routine = p.routine;
  const std::string of = std::string(" for ") + name_of(routine);
  const bool is_triangular = routine == Routine::kTrsv || routine == Routine::kTrsm;
  const bool is_level1 = routine <= Routine::kSwap;
  struct Extent {
    const char* name;
    int64_t got, unused;
    bool is_used;
  };
  for (const auto& [name, got, unused, is_used] :
       {Extent{"items", p.items, routine == Routine::kSwap ? 2 : 1, routine == Routine::kGemm},
        {"m", p.m, 1, !is_level1},
        {"n", p.n, 1, routine != Routine::kTrsv},
        {"k", p.k, 1, routine == Routine::kGemm},
        {"kl", p.kl, 0, routine == Routine::kGbmv},
        {"ku", p.ku, 0, routine == Routine::kGbmv}}) {
    if (!is_used && got != unused) return must(name, "be " + std::to_string(unused) + of, got);
  }
  for (const auto& [name, got, is_used] : {std::tuple{"right", p.right, routine == Routine::kTrsm},
                                           {"upper", p.upper, is_triangular},
                                           {"unit", p.unit, is_triangular},
                                           {"has_c", p.has_c, has_result_like_c(routine)},
                                           {"scalar_args", p.scalar_args, has_alpha(routine)}}) {
    if (got && !is_used) return std::string(name) + " must be false" + of + ", got true";
  }
  for (const auto& [name, op, is_used] : {std::tuple{"op_a", p.op_a, !is_level1 || routine == Routine::kDot},
                                          {"op_b", p.op_b, routine == Routine::kGemm}}) {
    if (!is_used && op != Op::kN) return std::string(name) + " must be N" + of + ", got " + name_of(op);
  }
  const auto check_scalar = [&](const char* name, std::complex<double> x, bool is_used, double unused) -> std::string {
    if (is_used ? x.imag() == 0.0 || is_complex(p.dtype) : x == unused) return "";
    const std::string rule = is_used ? std::string("real for ") + name_of(p.dtype) : (unused == 0.0 ? "0" : "1") + of;
    return std::string(name) + " must be " + rule + ", got " + std::to_string(x.real()) + " + " +
           std::to_string(x.imag()) + "i";
  };
  if (std::string error = check_scalar("alpha", p.alpha, has_alpha(routine), 1.0); !error.empty()) return error;
  // axpy's is 1 whatever is said, and nothing reads it.
  return check_scalar("beta", p.beta, has_beta(routine) || routine == Routine::kAxpy, 0.0);
}

// Of each name, without the second vector of a swap.
int64_t num_items(const Problem& p) { return p.routine == Routine::kSwap ? 1 : std::max<int64_t>(p.items, 0); }

DType result_dtype(const Problem& p) {
  switch (p.routine) {
    case Routine::kIamax:
    case Routine::kIamin: return DType::kS32;
    case Routine::kAsum:
    case Routine::kNrm2: return real_dtype(p.dtype);
    default: return p.dtype;
  }
}

Op transposed(Op op) { return op == Op::kN ? Op::kT : Op::kN; }

// Entry after entry, without a gap, each of `rows` rows.
bool is_stacked(const Layout& x, int64_t rows) { return x.batch_stride == rows * x.ld; }

}  // namespace

bool is_complex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }

DType real_dtype(DType dtype) {
  switch (dtype) {
    case DType::kC64: return DType::kF32;
    case DType::kC128: return DType::kF64;
    default: return dtype;
  }
}

DType scale_dtype(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16 ? DType::kF32 : dtype; }

bool has_a(Routine routine) { return routine != Routine::kScal && routine != Routine::kSwap; }

bool has_b(Routine routine) {
  return routine == Routine::kDot || routine == Routine::kGemv || routine == Routine::kGbmv ||
         routine == Routine::kGemm;
}

bool has_alpha(Routine routine) {
  return routine >= Routine::kScal && routine != Routine::kSwap && routine != Routine::kTrsv;
}

bool has_beta(Routine routine) {
  return routine == Routine::kGemv || routine == Routine::kGbmv || routine == Routine::kGemm;
}

bool has_result_like_c(Routine routine) { return routine >= Routine::kScal; }

std::string check_problem(const Problem& p) {
  switch (p.dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kC64:
    case DType::kC128: break;
    default: return std::string("the dtype must be f16, bf16, f32, f64, c64 or c128, got ") + name_of(p.dtype);
  }
  constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;
  for (const auto& [name, extent] :
       {std::pair{"m", p.m}, {"n", p.n}, {"k", p.k}, {"batch", p.batch}, {"items", p.items}}) {
    if (extent < 1 || extent > kMaxExtent) return must(name, "be in [1, 2147483647]", extent);
  }
  for (const auto& [name, extent] : {std::pair{"kl", p.kl}, {"ku", p.ku}}) {
    if (extent < 0 || extent >= kMaxExtent / 2) return must(name, "be in [0, 1073741822]", extent);
  }
  if (std::string error = check_unused(p); !error.empty()) return error;
  if (p.routine == Routine::kGbmv && p.op_a == Op::kC && is_complex(p.dtype)) {
    return "gbmv's op_a must be N or T; conjugate the vectors and use T";
  }
  if (!p.has_c && has_result_like_c(p.routine)) {
    if (!has_beta(p.routine) || (!p.scalar_args && p.beta != 0.0)) return "c must be given";
  }
  if (has_a(p.routine)) {
    if (std::string error = check_layout("a", p.a, shape_of_a(p)); !error.empty()) return error;
  }
  const bool updates_b = p.routine == Routine::kSwap;
  if (has_b(p.routine) || updates_b) {
    if (std::string error = check_layout("b", p.b, shape_of_b(p)); !error.empty()) return error;
    if (std::string error = updates_b ? check_written(p, "b", p.b, shape_of_b(p)) : ""; !error.empty()) return error;
  }
  if (!has_result_like_c(p.routine)) return "";
  if (std::string error = check_layout("c", p.c, shape_of_c(p)); !error.empty()) return error;
  return check_written(p, "c", p.c, shape_of_c(p));
}

int64_t required_elements_a(const Problem& p) { return required(p, p.a, shape_of_a(p)); }
int64_t required_elements_b(const Problem& p) { return required(p, p.b, shape_of_b(p)); }
int64_t required_elements_c(const Problem& p) { return required(p, p.c, shape_of_c(p)); }

const BufferTable<Problem, Buffers>& buffer_table(const Problem&) {
  using P = const Problem;
  const auto dtype = [](P& p) { return p.dtype; };
  const auto scale = [](P& p) { return scale_dtype(p.dtype); };
  const auto one = [](P&) -> int64_t { return 1; };
  const auto scalars = [](P& p) -> int64_t { return p.scalar_args; };
  const auto put_c = [](P& p, Buffers& buffers, void* x, int64_t elements) {
    buffers.c.push_back(x);
    buffers.c_bytes.push_back(elements * dtype_bytes(p.dtype));
  };
  const auto put_d = [](P&, Buffers& buffers, void* x, int64_t) { buffers.d.push_back(x); };
  // The second vector of a swap has the layout b.
  static const BufferTable<Problem, Buffers> table{
      {"a", BufferRole::kOperand, [](P& p) { return has_a(p.routine) ? num_items(p) : 0; }, required_elements_a, dtype,
       [](P&, Buffers& buffers, void* x, int64_t) { buffers.a.push_back(x); }},
      {"b", BufferRole::kOperand, [](P& p) { return has_b(p.routine) ? num_items(p) : 0; }, required_elements_b, dtype,
       [](P&, Buffers& buffers, void* x, int64_t) { buffers.b.push_back(x); }},
      {"c", BufferRole::kReplaced, [](P& p) { return p.has_c ? num_items(p) : 0; }, required_elements_c, dtype, put_c},
      {"c", BufferRole::kReplaced, [](P& p) -> int64_t { return p.has_c && p.routine == Routine::kSwap; },
       required_elements_b, dtype, put_c},
      {"alpha", BufferRole::kOperand, scalars, one, scale, put<&Buffers::alpha>},
      {"beta", BufferRole::kOperand, scalars, one, scale, put<&Buffers::beta>},
      {"d", BufferRole::kSuccessor, num_items,
       [](P& p) { return has_result_like_c(p.routine) ? required_elements_c(p) : p.batch; }, result_dtype, put_d},
      {"d", BufferRole::kSuccessor, [](P& p) -> int64_t { return p.routine == Routine::kSwap; }, required_elements_b,
       dtype, put_d},
  };
  return table;
}

void fold_batch(Problem* problem, Buffers* buffers) {
  Problem& p = *problem;
  if (p.batch == 1 || p.items != 1) return;
  const auto grow = [&p](int64_t Problem::* extent) {
    if (multiply_add(p.*extent, p.batch, 0) >= int64_t{1} << 31) return;
    p.*extent *= p.batch;
    p.batch = 1;
  };
  // Of batch strides that become leading dimensions, which have 31 bits.
  const auto is_ld = [](int64_t stride, int64_t columns) { return stride >= columns && stride < int64_t{1} << 31; };
  const bool shares_a = p.a.batch_stride == 0 && !(p.op_a == Op::kC && is_complex(p.dtype));
  switch (p.routine) {
    case Routine::kScal:
      if (is_stacked(p.c, p.n)) grow(&Problem::n);
      return;
    case Routine::kAxpy:
      if (is_stacked(p.a, p.n) && is_stacked(p.c, p.n)) grow(&Problem::n);
      return;
    case Routine::kGemv:
      // Y = X op(A)^T: the vectors are rows, and X is the first matrix.
      if (!shares_a || p.b.ld != 1 || p.c.ld != 1) return;
      if (!is_ld(p.b.batch_stride, shape_of_b(p).rows) || !is_ld(p.c.batch_stride, shape_of_c(p).rows)) return;
      if (p.op_a != Op::kN) std::swap(p.m, p.n);
      p.k = p.n;
      p.n = p.m;
      p.m = p.batch;
      p.batch = 1;
      p.routine = Routine::kGemm;
      p.op_b = transposed(p.op_a);
      p.op_a = Op::kN;
      p.b = {std::exchange(p.a, {p.b.batch_stride, 0}).ld, 0};
      p.c = {p.c.batch_stride, 0};
      std::swap(buffers->a, buffers->b);
      return;
    case Routine::kTrsv:
      // X op(A)^T = B: the right-hand sides are rows.
      if (!shares_a || p.c.ld != 1 || !is_ld(p.c.batch_stride, p.m)) return;
      p.n = p.m;
      p.m = p.batch;
      p.batch = 1;
      p.routine = Routine::kTrsm;
      p.right = true;
      p.op_a = transposed(p.op_a);
      p.c = {p.c.batch_stride, 0};
      return;
    case Routine::kTrsm:
      if (p.right && p.a.batch_stride == 0 && is_stacked(p.c, p.m)) grow(&Problem::m);
      return;
    case Routine::kGemm:
      if (p.op_a == Op::kN && p.b.batch_stride == 0 && is_stacked(p.a, p.m) && is_stacked(p.c, p.m)) {
        grow(&Problem::m);
      }
      return;
    default: return;
  }
}

std::string describe(const Problem& p) {
  std::string text = std::string(name_of(p.routine)) + " " + name_of(p.dtype) + " ";
  text += name_of(p.op_a);
  text += name_of(p.op_b);
  if (p.routine == Routine::kTrsv || p.routine == Routine::kTrsm) {
    text += p.right ? " right" : " left";
    text += p.upper ? " upper" : " lower";
    if (p.unit) text += " unit";
  }
  for (const auto& [name, value] : {std::pair{"batch", p.batch},
                                    {"items", p.items},
                                    {"m", p.m},
                                    {"n", p.n},
                                    {"k", p.k},
                                    {"kl", p.kl},
                                    {"ku", p.ku},
                                    {"a_ld", p.a.ld},
                                    {"b_ld", p.b.ld},
                                    {"c_ld", p.c.ld}}) {
    text += std::string(" ") + name + "=" + std::to_string(value);
  }
  return text;
}

}  // namespace tcgemm::blas
