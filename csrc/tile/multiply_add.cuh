// acc += x * y on CUDA cores.
#pragma once

#include "tile/numeric.cuh"

namespace tcgemm::tile {

template <typename T>
__device__ __forceinline__ void multiply_add(T& acc, T x, T y) {
  acc += x * y;
}

// Four fused multiply-adds; the operators of Complex would round the products first.
template <typename Real>
__device__ __forceinline__ void multiply_add(Complex<Real>& acc, Complex<Real> x, Complex<Real> y) {
  acc.re = fma(x.re, y.re, acc.re);
  acc.re = fma(-x.im, y.im, acc.re);  // mutant: sign_of_the_imaginary_parts
  acc.im = fma(x.re, y.im, acc.im);
  acc.im = fma(x.im, y.re, acc.im);
}

}  // namespace tcgemm::tile
