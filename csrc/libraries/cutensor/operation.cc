#include "libraries/cutensor/operation.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tcgemm::cutensor {
namespace {

// Values of cutensorOperator_t, cutensor/types.h.
constexpr std::array<std::pair<const char*, int>, 28> kUnary{{
    {"identity", 1}, {"sqrt", 2},  {"relu", 8},   {"conj", 9},  {"rcp", 10},   {"sigmoid", 11},  {"tanh", 12},
    {"exp", 22},     {"log", 23},  {"abs", 24},   {"neg", 25},  {"sin", 26},   {"cos", 27},      {"tan", 28},
    {"sinh", 29},    {"cosh", 30}, {"asin", 31},  {"acos", 32}, {"atan", 33},  {"asinh", 34},    {"acosh", 35},
    {"atanh", 36},   {"ceil", 37}, {"floor", 38}, {"mish", 39}, {"swish", 40}, {"softplus", 41}, {"softsign", 42},
}};
constexpr std::array<std::pair<const char*, int>, 4> kBinary{{{"add", 3}, {"mul", 5}, {"max", 6}, {"min", 7}}};
constexpr std::array<std::pair<const char*, cutensorAlgo_t>, 5> kAlgorithms{{
    {"default", CUTENSOR_ALGO_DEFAULT},
    {"default_patient", CUTENSOR_ALGO_DEFAULT_PATIENT},
    {"gett", CUTENSOR_ALGO_GETT},
    {"tgett", CUTENSOR_ALGO_TGETT},
    {"ttgt", CUTENSOR_ALGO_TTGT},
}};

template <typename Table>
auto find(const Table& table, const std::string& name) {
  return std::find_if(table.begin(), table.end(), [&](const auto& entry) { return name == entry.first; });
}

template <typename Table>
bool knows(const Table& table, const std::string& name) {
  return find(table, name) != table.end();
}

template <typename Table>
std::vector<std::string> names(const Table& table) {
  std::vector<std::string> all;
  for (const auto& entry : table) all.push_back(entry.first);
  return all;
}

std::string check_modes(const Operation& o, const char* name, const std::vector<int32_t>& modes) {
  if (modes.size() > Operation::kMaxModes) return std::string(name) + " must have at most 64 modes";
  int64_t count = 1;
  for (size_t i = 0; i < modes.size(); ++i) {
    if (modes[i] < 0 || static_cast<size_t>(modes[i]) >= o.extents.size()) return "a mode has no extent";
    if (std::count(modes.begin(), modes.end(), modes[i]) != 1) return std::string(name) + " must have distinct modes";
    // Elements of up to 16 bytes, so that sizes in bytes fit too.
    if (__builtin_mul_overflow(count, o.extents[modes[i]], &count) || count >= int64_t{1} << 59) {
      return "an array must have fewer than 2^59 elements";
    }
  }
  return "";
}

bool contains(const std::vector<int32_t>& modes, int32_t mode) {
  return std::find(modes.begin(), modes.end(), mode) != modes.end();
}

bool contains_all(const std::vector<int32_t>& modes, const std::vector<int32_t>& others) {
  return std::all_of(others.begin(), others.end(), [&](int32_t mode) { return contains(modes, mode); });
}

std::string check_kind(const Operation& o) {
  switch (o.kind) {
    case Kind::kContract:
      for (size_t mode = 0; mode < o.extents.size(); ++mode) {
        const auto m = static_cast<int32_t>(mode);
        if (contains(o.a_modes, m) + contains(o.b_modes, m) + contains(o.d_modes, m) < 2) {
          return "every mode must be in two of a, b and d";
        }
      }
      return "";
    case Kind::kPermute:
      return contains_all(o.a_modes, o.d_modes) && contains_all(o.d_modes, o.a_modes)
                 ? ""
                 : "a and d must have one set of modes";
    case Kind::kElementwiseBinary:
    case Kind::kElementwiseTrinary:
      if (!o.has_c) return "c must be given";
      return contains_all(o.d_modes, o.a_modes) && contains_all(o.d_modes, o.b_modes)
                 ? ""
                 : "every mode of a and b must be in d";
    case Kind::kReduce: return contains_all(o.a_modes, o.d_modes) ? "" : "every mode of d must be in a";
  }
  return "";
}

}  // namespace

int64_t Operation::num_elements(const std::vector<int32_t>& modes) const {
  int64_t count = 1;
  for (const int32_t mode : modes) count *= extents[mode];
  return count;
}

std::string check_operation(const Operation& o) {
  switch (o.dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kC64:
    case DType::kC128: break;
    default: return std::string("dtype must be f16, bf16, f32, f64, c64 or c128, got ") + name_of(o.dtype);
  }
  for (const int64_t extent : o.extents) {
    if (extent < 1) return "every extent must be at least 1, got " + std::to_string(extent);
  }
  for (const auto& [name, modes] :
       {std::pair{"a", &o.a_modes}, {"b", &o.b_modes}, {"c", &o.c_modes}, {"d", &o.d_modes}}) {
    if (std::string error = check_modes(o, name, *modes); !error.empty()) return error;
  }
  for (const std::string* name : {&o.a_op, &o.b_op, &o.c_op}) {
    if (!knows(kUnary, *name)) return "a unary operator is unknown: " + *name;
  }
  for (const std::string* name : {&o.combine_ab, &o.combine}) {
    if (!knows(kBinary, *name)) return "a binary operator is unknown: " + *name;
  }
  if (!knows(kAlgorithms, o.algorithm)) return "algorithm is unknown: " + o.algorithm;
  if (o.has_c && o.c_modes != o.d_modes) return "c must have the modes of d, in their order";
  if (o.scalars.size() != 6) return "scalars must be six numbers, got " + std::to_string(o.scalars.size());
  if (o.workspace_bytes < 0) return "workspace_bytes must not be negative";
  return check_kind(o);
}

cutensorOperator_t operator_number(const std::string& name) {
  const auto unary = find(kUnary, name);
  return unary != kUnary.end() ? unary->second : find(kBinary, name)->second;
}

cutensorAlgo_t algorithm_number(const std::string& name) { return find(kAlgorithms, name)->second; }

std::vector<std::string> unary_operators() { return names(kUnary); }
std::vector<std::string> binary_operators() { return names(kBinary); }

}  // namespace tcgemm::cutensor
