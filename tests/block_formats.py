"""Operands in block formats (MXFP8, MXFP4, NVFP4) with their product in float64."""

import jax.numpy as jnp
import numpy as np

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
E8M0, E2M1 = jnp.float8_e8m0fnu, jnp.float4_e2m1fn
# Dtypes of both operands, of their scales, and how many elements have one scale.
FORMATS = {
    "MXFP8": (E4M3, E4M3, E8M0, 32),
    "MXFP8 of both dtypes": (E5M2, E4M3, E8M0, 32),
    "MXFP4": (E2M1, E2M1, E8M0, 32),
    "NVFP4": (E2M1, E2M1, E4M3, 16),
    "MXFP8 by MXFP4": (E4M3, E2M1, E8M0, 32),
    "scales of 3 bits": (E4M3, E5M2, E5M2, 64),
}


def exact(x):
    return np.asarray(x).astype(np.float64)


def dequantized(x, scales, block):
    return exact(x) * np.repeat(exact(scales), block, -1)


def of_format(name, m=24, n=56, k=192):
    """Operands and scales over many powers of two, and their product in float64."""
    *dtypes, scale_dtype, block = FORMATS[name]
    rng = np.random.default_rng()
    arrays, scales = [], []
    for dtype, rows in zip(dtypes, (m, n), strict=True):
        arrays.append(jnp.asarray(rng.standard_normal((rows, k)), jnp.float32).astype(dtype))
        exponents = rng.integers(-4, 5, (rows, k // block))
        scales.append(jnp.asarray(2.0**exponents, jnp.float32).astype(scale_dtype))
    x, w = (dequantized(*each, block) for each in zip(arrays, scales, strict=True))
    return (*arrays, *scales), x @ w.T
