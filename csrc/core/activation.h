// The one list of activations: their names, and the functors of epilogue/activations.h that compute them.
#pragma once

#include <cstdint>

// X(name, functor)
#define TCGEMM_ACTIVATIONS(X) \
  X(none, None)               \
  X(relu, Relu)               \
  X(relu2, Relu2)             \
  X(gelu_tanh, GeluTanh)      \
  X(gelu_erf, GeluErf)        \
  X(silu, Silu)               \
  X(sigmoid, Sigmoid)         \
  X(tanh, Tanh)               \
  X(leaky_relu, LeakyRelu)

namespace tcgemm {

enum class Activation : int32_t {
#define TCGEMM_ENTRY(name, functor) k##functor,
  TCGEMM_ACTIVATIONS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
};

}  // namespace tcgemm
