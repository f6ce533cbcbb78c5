// The activations of core/activation.h, for the host and the device: each a functor with the function itself
// and its derivative. jax_tcgemm/problem/activations.py has the same functions from JAX, and a test compares both
// sides.
//
//   value(x)        f(x)
//   gradient(x, g)  g * f'(x)
//
// Real is float or, on the host, double. NaN goes in and comes out, and large finite arguments give the limit.
// On the device, exponentials and reciprocals are the hardware's: the largest relative error of a
// float32 value is about 2e-6 (1 + |x|), far below the rounding of a 16-bit result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/activation.h"

#if defined(__CUDACC__)
#include "ptx/math.cuh"
#define TCGEMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TCGEMM_HOST_DEVICE inline
#endif

namespace tcgemm {

namespace activation {

#if !defined(__CUDA_ARCH__)
// e^x without a branch or a call, which compilers turn into vector instructions; relative error 2^-21.
// Below e^-87.7 it is 0, from e^88.4 on infinity. x = n ln(2) + r, and e^r by its Taylor series.
inline float vectorizable_exponential(float x) {
  float y = x > -88.0f ? x : -88.0f;
  y = y < 89.0f ? y : 89.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const float n = (y * 1.4426950408889634f + kRound) - kRound;
  // ln(2) in two parts, so that the first product is exact.
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float sum = 1.0f / 5040.0f;
  sum = sum * r + 1.0f / 720.0f;
  sum = sum * r + 1.0f / 120.0f;
  sum = sum * r + 1.0f / 24.0f;
  sum = sum * r + 1.0f / 6.0f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x == x ? sum * power : x;
}
#endif

template <typename Real>
TCGEMM_HOST_DEVICE Real exponential(Real x) {
#if defined(__CUDA_ARCH__)
  return ptx::ex2_approx_ftz_f32(x * 1.4426950408889634f);
#else
  if constexpr (std::is_same_v<Real, float>) return vectorizable_exponential(x);
  return std::exp(x);
#endif
}

template <typename Real>
TCGEMM_HOST_DEVICE Real reciprocal(Real x) {
#if defined(__CUDA_ARCH__)
  return ptx::rcp_approx_ftz_f32(x);
#else
  return Real(1) / x;
#endif
}

template <typename Real>
TCGEMM_HOST_DEVICE Real hyperbolic_tangent(Real x) {
#if defined(__CUDA_ARCH__)
  return tanhf(x);
#else
  return std::tanh(x);
#endif
}

template <typename Real>
TCGEMM_HOST_DEVICE Real complementary_error(Real x) {
#if defined(__CUDA_ARCH__)
  return erfcf(x);
#else
  return std::erfc(x);
#endif
}

template <typename Real>
TCGEMM_HOST_DEVICE Real logistic(Real x) {
  return reciprocal(Real(1) + exponential(-x));
}

struct None {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x;
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real, Real g) {
    return g;
  }
};

struct Relu {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x < Real(0) ? Real(0) : x;  // a NaN is not less
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    return x > Real(0) ? g : Real(0);
  }
};

struct Relu2 {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    const Real r = Relu::value(x);
    return r * r;
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    return Real(2) * Relu::value(x) * g;
  }
};

// 0.5 x (1 + tanh(u)) = x logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x * normal(x);
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    const Real s = normal(x);
    // Where the square is cut off, s is 0 or 1 and what it multiplies vanishes.
    const Real square = x * x < Real(1e4) ? x * x : Real(1e4);
    return g * (s + x * s * (Real(1) - s) * (Real(kLinear) + Real(3 * kCubic) * square));
  }

 private:
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;

  // logistic(2 u), which is near the normal distribution.
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real normal(Real x) {
#if defined(__CUDA_ARCH__)
    constexpr double kLog2E = 1.4426950408889634;  // as a factor of the constants, not of each number
    const Real exponent = x * (Real(-kLog2E * kLinear) + Real(-kLog2E * kCubic) * x * x);
    return reciprocal(Real(1) + ptx::ex2_approx_ftz_f32(exponent));
#else
    return logistic(x * (Real(kLinear) + Real(kCubic) * x * x));
#endif
  }
};

// x Phi(x), Phi(x) = erfc(-x / sqrt(2)) / 2
struct GeluErf {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x * normal(x);
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    const Real density = Real(0.3989422804014327) * exponential(Real(-0.5) * x * x);
    return g * (normal(x) + x * density);
  }

 private:
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real normal(Real x) {
    return Real(0.5) * complementary_error(x * Real(-0.7071067811865476));
  }
};

struct Silu {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x * logistic(x);
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    const Real s = logistic(x);
    return g * (s + x * s * (Real(1) - s));
  }
};

struct Sigmoid {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return logistic(x);
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    const Real s = logistic(x);
    return g * s * (Real(1) - s);
  }
};

struct Tanh {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return hyperbolic_tangent(x);
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    const Real t = hyperbolic_tangent(x);
    return g * (Real(1) - t) * (Real(1) + t);
  }
};

struct LeakyRelu {
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real value(Real x) {
    return x >= Real(0) ? x : Real(0.01) * x;
  }
  template <typename Real>
  static TCGEMM_HOST_DEVICE Real gradient(Real x, Real g) {
    return x >= Real(0) ? g : Real(0.01) * g;
  }
};

// Whether the code of a function is so long that a kernel should not hold it once for each value.
template <typename Function>
inline constexpr bool kIsLong = false;
template <>
inline constexpr bool kIsLong<GeluErf> = true;
template <>
inline constexpr bool kIsLong<Tanh> = true;

// Calls visit(Functor{}) for the one that is named: a branch outside, straight-line code inside.
template <typename Visit>
TCGEMM_HOST_DEVICE void visit(Activation which, Visit&& visit) {
  switch (which) {
#define TCGEMM_ENTRY(name, functor) \
  case Activation::k##functor: visit(functor{}); break;
    TCGEMM_ACTIVATIONS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  }
}

}  // namespace activation
}  // namespace tcgemm
