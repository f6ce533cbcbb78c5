// Sum of one array of each of several devices, which every device gets.
//
//   D = A of device 0 + A of device 1 + ...      rounded once; the same bits on every device
#pragma once

#include <cstdint>
#include <string>

#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

namespace all_reduce {
class CallState;
}

struct AllReduceProblem {
  int64_t elements;
  int64_t devices;
  DType in;  // of A and D

  bool is_empty() const { return elements == 0; }
};

// See problem.h.
template <typename Visit>
void visit_fields(AllReduceProblem& p, Visit&& visit) {
  visit("elements", p.elements);
  visit("devices", p.devices);
}

template <typename Visit>
void visit_dtypes(AllReduceProblem& p, Visit&& visit) {
  visit("a", "in_dtype", p.in);
}

inline Features features_of(const AllReduceProblem&) { return {}; }

// Addresses of one call, and the state that the call has on all devices of this process.
struct AllReduceBuffers {
  const void* a = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  const all_reduce::CallState* state = nullptr;
};

// The arrays of a call: a -> d.
const BufferTable<AllReduceProblem, AllReduceBuffers>& buffer_table(const AllReduceProblem& problem);

using AllReduceImplementation = ImplementationOf<AllReduceProblem, AllReduceBuffers>;
using AllReduceImplementations = ImplementationsOf<AllReduceProblem, AllReduceBuffers>;

// Empty when the extents are in range and the dtype is known to some implementation, else the first rule broken.
std::string check_problem(const AllReduceProblem& problem);

}  // namespace tcgemm
