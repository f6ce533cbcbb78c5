// Element types of the device code and the conversions between them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tcgemm {

// Complex arithmetic without <cuda/std/complex>: device headers include CUDA's own basics only.
template <typename Real>
struct alignas(2 * sizeof(Real)) Complex {
  Real re, im;
};

template <typename Real>
__host__ __device__ __forceinline__ Complex<Real> operator+(Complex<Real> x, Complex<Real> y) {
  return {x.re + y.re, x.im + y.im};
}
template <typename Real>
__host__ __device__ __forceinline__ Complex<Real> operator*(Complex<Real> x, Complex<Real> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
template <typename Real>
__host__ __device__ __forceinline__ Complex<Real> operator*(Complex<Real> x, Real y) {
  return {x.re * y, x.im * y};
}

template <typename T>
struct real_of {
  using type = T;
};
template <typename Real>
struct real_of<Complex<Real>> {
  using type = Real;
};
template <typename T>
using real_of_t = typename real_of<T>::type;

// An output type known at run time only.
enum class FloatType : int32_t { kF16, kBF16, kF32 };

// convert<To>(x): round to nearest even where To is narrower; integers to int32 exactly.
template <typename To, typename From>
struct Convert {
  static __device__ __forceinline__ To apply(From x) { return static_cast<To>(x); }
};
template <typename T>
struct Convert<T, T> {
  static __device__ __forceinline__ T apply(T x) { return x; }
};
template <>
struct Convert<float, __half> {
  static __device__ __forceinline__ float apply(__half x) { return __half2float(x); }
};
template <>
struct Convert<float, __nv_bfloat16> {
  static __device__ __forceinline__ float apply(__nv_bfloat16 x) { return __bfloat162float(x); }
};
template <>
struct Convert<__half, float> {
  static __device__ __forceinline__ __half apply(float x) { return __float2half_rn(x); }
};
template <>
struct Convert<__nv_bfloat16, float> {
  static __device__ __forceinline__ __nv_bfloat16 apply(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Convert<__half, __nv_bfloat16> {
  static __device__ __forceinline__ __half apply(__nv_bfloat16 x) { return __float2half_rn(__bfloat162float(x)); }
};
template <>
struct Convert<__nv_bfloat16, __half> {
  static __device__ __forceinline__ __nv_bfloat16 apply(__half x) { return __float2bfloat16_rn(__half2float(x)); }
};

template <typename To, typename From>
__device__ __forceinline__ To convert(From x) {
  return Convert<To, From>::apply(x);
}

// Calls visit(T{}) with the type's own type.
template <typename Visit>
__device__ __forceinline__ void visit_float(FloatType type, Visit&& visit) {
  switch (type) {
    case FloatType::kF16: visit(__half{}); break;
    case FloatType::kBF16: visit(__nv_bfloat16{}); break;
    case FloatType::kF32: visit(float{}); break;
  }
}

}  // namespace tcgemm
