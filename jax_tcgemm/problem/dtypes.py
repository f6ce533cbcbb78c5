"""Names of dtypes on the C++ side, the largest extent, and dtypes of accumulators."""

import jax.numpy as jnp
import numpy as np

# Names on the C++ side of the dtypes that implementations take.
DTYPE_NAMES = {
    np.dtype(jnp.float16): "f16",
    np.dtype(jnp.bfloat16): "bf16",
    np.dtype(jnp.float32): "f32",
    np.dtype(jnp.float64): "f64",
    np.dtype(jnp.int8): "s8",
    np.dtype(jnp.uint8): "u8",
    np.dtype(jnp.int32): "s32",
    np.dtype(jnp.complex64): "c64",
    np.dtype(jnp.complex128): "c128",
    np.dtype(jnp.float8_e4m3fn): "f8e4m3fn",
    np.dtype(jnp.float8_e5m2): "f8e5m2",
}
# Dtypes of block scales, which include float8_e8m0fnu (powers of two); no operand has that dtype.
SCALE_DTYPE_NAMES = DTYPE_NAMES | {np.dtype(jnp.float8_e8m0fnu): "f8e8m0fnu"}
DTYPES = {name: dtype for dtype, name in SCALE_DTYPE_NAMES.items()}

# 8-bit floats; a product may have operands of both dtypes.
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))

# Largest extent of one dimension; elements are indexed with 64 bits.
MAX_EXTENT = 2**31 - 1


def wide_dtype(dtype) -> jnp.dtype:
    """Return the dtype of an epilogue whose result is rounded to `dtype`: float32 or wider."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32 if is_narrow else dtype)


def accumulator_dtype(lhs_dtype, rhs_dtype) -> np.dtype:
    """Return the dtype of a product's accumulators: at least float32, for integers int32."""
    if lhs_dtype in FLOAT8 and rhs_dtype in FLOAT8:  # which JAX does not promote to one another
        return np.dtype(np.float32)
    dtype = jnp.promote_types(lhs_dtype, rhs_dtype)
    if jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).itemsize <= 4:
        return np.dtype(np.int32)
    return wide_dtype(dtype)
