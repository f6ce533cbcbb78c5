// The arrays of a call, in tables: each kind of problem has one.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.h"

namespace tcgemm {

enum class BufferRole {
  kOperand,
  kReplaced,  // an operand in whose place the first result may lie
  kOptional,  // the same, and it may be given where it is not read
  kResult,
  kSuccessor,  // a result in the place of the replaced operand of its own number, and as long as that
};

// One array, or several of one kind that follow each other.
template <typename Problem, typename Buffers>
struct BufferRule {
  const char* name;
  BufferRole role;
  int64_t (*count)(const Problem&);
  // What follows is asked of problems that have passed check_problem() only. Without both of these an array is one of
  // any dtype, and check_buffers() says whether it is long enough.
  int64_t (*elements)(const Problem&);  // that an operand must hold at least, a result exactly
  DType (*dtype)(const Problem&);
  // Takes the address of one that has so many elements, of any dtype so many bytes.
  void (*put)(const Problem&, Buffers&, void* address, int64_t elements);

  bool is_result() const { return role == BufferRole::kResult || role == BufferRole::kSuccessor; }
};

// In the order of the call: operands, then results.
template <typename Problem, typename Buffers>
using BufferTable = std::vector<BufferRule<Problem, Buffers>>;

// BufferRule::put of a plain member.
template <auto kMember, typename Problem, typename Buffers>
void put(const Problem&, Buffers& buffers, void* address, int64_t) {
  buffers.*kMember = static_cast<std::remove_reference_t<decltype(buffers.*kMember)>>(address);
}

// What is wrong with the sizes of arrays of any dtype: a problem that has such has an overload.
template <typename Problem, typename Buffers>
std::string check_buffers(const Problem&, const Buffers&) {
  return "";
}

}  // namespace tcgemm
