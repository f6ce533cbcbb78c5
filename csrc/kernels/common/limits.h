// The rules hand-written kernels share when they decide whether they can run a problem. Each
// function returns the rule that is broken as a phrase, or nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/extent.h"
#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

// One combination of types that a family has kernels for.
struct TypeRule {
  DType a, b;
  Compute compute;
  std::vector<DType> outs;

  TypeRule(DType a, DType b, Compute compute, std::vector<DType> outs)
      : a(a), b(b), compute(compute), outs(std::move(outs)) {}
  TypeRule(DType both, Compute compute, std::vector<DType> outs) : TypeRule(both, both, compute, std::move(outs)) {}

  bool allows(DType out) const { return std::find(outs.begin(), outs.end(), out) != outs.end(); }
};

inline std::string compute_capability_name(int x) { return std::to_string(x / 10) + "." + std::to_string(x % 10); }

inline std::string reject_device(const Device& device, int compute_capability) {
  if (device.compute_capability >= compute_capability) return "";
  return "the device must have compute capability " + compute_capability_name(compute_capability) + " or later, got " +
         compute_capability_name(device.compute_capability);
}

// Of kernels that exist for one architecture only.
inline std::string reject_other_devices(const Device& device, int compute_capability) {
  if (device.compute_capability == compute_capability) return "";
  return "the device must have compute capability " + compute_capability_name(compute_capability) + ", got " +
         compute_capability_name(device.compute_capability);
}

inline std::string reject_types(DType a, DType b, Compute compute, DType out, const std::vector<TypeRule>& rules) {
  for (const TypeRule& rule : rules) {
    if (rule.a == a && rule.b == b && rule.compute == compute && rule.allows(out)) return "";
  }
  const auto append = [](std::string& list, const char* name) {
    if ((", " + list + ", ").find(std::string(", ") + name + ", ") != std::string::npos) return;
    list += (list.empty() ? "" : ", ") + std::string(name);
  };
  std::string of_a, of_b, computes, outs;
  for (const TypeRule& rule : rules) {
    append(of_a, name_of(rule.a));
    if (rule.a != a) continue;
    append(of_b, name_of(rule.b));
    if (rule.b != b) continue;
    append(computes, name_of(rule.compute));
    if (rule.compute != compute) continue;
    for (const DType known : rule.outs) append(outs, name_of(known));
  }
  if (of_b.empty()) return "inputs must be " + of_a + ", got " + name_of(a);
  if (computes.empty()) return "b must be " + of_b + " where a is " + name_of(a) + ", got " + name_of(b);
  const std::string inputs = a == b ? name_of(a) : name_of(a) + std::string(" and ") + name_of(b);
  if (outs.empty()) return "compute for " + inputs + " inputs must be " + computes + ", got " + name_of(compute);
  return "the output of " + inputs + " inputs must be " + outs + ", got " + name_of(out);
}

// A function may give anything.
inline std::string reject_types(const Problem& p, const std::vector<TypeRule>& rules) {
  DType out = p.out;
  if (!p.epilogue.function.is_none()) {
    out = p.compute == Compute::kS32 ? DType::kS32 : p.compute == Compute::kF64 ? DType::kF64 : DType::kF32;
  }
  return reject_types(p.a.dtype, p.b.dtype, p.compute, out, rules);
}

// A grid of one block a tile.
inline std::string reject_grid(const Problem& p, int64_t tile_m, int64_t tile_n) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (p.m > kMax || p.n > kMax || p.k > kMax) return "m, n and k must be at most 2^31 - 1 each";
  if (p.batch > 0 && ceil_div(p.m, tile_m) * ceil_div(p.n, tile_n) > kMax / p.batch) {
    return "the output must be at most 2^31 - 1 tiles of " + std::to_string(tile_m) + "x" + std::to_string(tile_n);
  }
  return "";
}

// alpha and beta must be exact in the accumulator's type.
inline std::string reject_scalars(const Problem& p) {
  const auto is_int32 = [](double x) {
    return x >= std::numeric_limits<int32_t>::min() && x <= std::numeric_limits<int32_t>::max() &&
           x == static_cast<double>(static_cast<int32_t>(x));
  };
  if (p.compute == Compute::kS32 && !(is_int32(p.alpha) && is_int32(p.beta))) {
    return "alpha and beta must be 32-bit integers when compute is s32, got " + std::to_string(p.alpha) + " and " +
           std::to_string(p.beta);
  }
  return "";
}

}  // namespace tcgemm
