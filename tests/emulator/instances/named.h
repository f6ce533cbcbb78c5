// Kernels of csrc by the names that their families look them up by.
#pragma once

#include "kernels/common/kernel.h"

// Of one instantiation, a C++ expression as the family writes it.
#define EMULATED_KERNEL(...) tcgemm::add_kernel(#__VA_ARGS__, reinterpret_cast<const void*>(&__VA_ARGS__))
