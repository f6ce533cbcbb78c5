"""The public `quantize`."""

import functools
from operator import index

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.products.arguments import as_array, canonical_element_type


def quantize(x, dtype=jnp.float8_e4m3fn, *, axis: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Rounds an array to 8-bit floats, with scales by the largest magnitudes.

        scales = max(abs(x)) / max(dtype),  values = round(x / scales),  so that x ~ values * scales

    as `scaled_matmul` takes them.

    Args:
      x: array of a real floating-point dtype.
      dtype: float8_e4m3fn or float8_e5m2.
      axis: None for one scale, or the axis along which the largest magnitude is looked for: of the
        operands of `scaled_matmul` -1, for a scale for each row.

    Returns:
      The values, of the shape of x, and the scales, float32: a scalar without an axis, else of the
      shape of x with 1 in the place of that axis. Where x is zero throughout they are as small as
      normal numbers are.

    Raises:
      TypeError: for an x that is not real floating point, another dtype, or an axis that is no
        integer.
      ValueError: for an axis that x does not have, and for an x without elements along it.

    Numerics:
      Computed in float32, and rounded to nearest. Derivatives go straight through the rounding, and
      take the scales for constants: d values = dx / scales. As everywhere in JAX they have the
      dtype of what they are of, so that those of values have 8 bits: what a loss is multiplied by
      decides whether they underflow.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> values, scales = jax_tcgemm.quantize(jnp.array([[1.0, -7.0], [0.5, 0.25]]), axis=-1)
      >>> values.tolist(), (values.astype(jnp.float32) * scales).tolist()
      ([[64.0, -448.0], [448.0, 224.0]], [[1.0, -7.0], [0.5, 0.25]])
    """
    op = "quantize"
    x = as_array(op, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{op}: x must be of a real floating-point dtype, got x.dtype={x.dtype}; convert it"
        )
    canonical = _float8(op, dtype)
    if axis is not None:
        axis = _axis(op, axis, x.ndim)
    if x.size == 0 and (axis is None or x.shape[axis] == 0):
        raise ValueError(
            f"{op}: x must have an element at least along the axis, got x.shape={x.shape} and "
            f"{axis=}; leave it out"
        )
    return _quantize(x, canonical, axis)


def _float8(op: str, dtype) -> np.dtype:
    try:
        canonical = canonical_element_type(op, dtype)
    except TypeError:
        canonical = None
    if canonical not in FLOAT8:
        raise TypeError(
            f"{op}: dtype must be {' or '.join(map(str, FLOAT8))}, got {dtype=}; see jax.numpy"
        )
    return canonical


def _axis(op: str, axis, ndim: int) -> int:
    try:
        own = index(axis)
    except TypeError:
        raise TypeError(
            f"{op}: axis must be an integer or None, got axis of type {type(axis).__name__}; "
            "None takes one scale for all"
        ) from None
    if not -ndim <= own < ndim:
        raise ValueError(
            f"{op}: axis must be one of the {ndim} dimensions of x, got {axis=}; None takes one "
            "scale for all"
        )
    return own % ndim


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _quantize(x, dtype, axis):
    wide = x.astype(jnp.float32)
    largest = jnp.max(abs(wide), axis=axis, keepdims=axis is not None)
    scales = largest / jnp.finfo(dtype).max.astype(jnp.float32)
    scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
    return (wide / scales).astype(dtype), scales


@_quantize.defjvp
def _straight_through(dtype, axis, primals, tangents):
    values, scales = _quantize(*primals, dtype, axis)
    dvalues = (tangents[0].astype(jnp.float32) / scales).astype(dtype)
    return (values, scales), (dvalues, jnp.zeros_like(scales))
