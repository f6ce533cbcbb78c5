"""Public `pack_mxfp4`, `pack_mxfp8` and `pack_nvfp4`: quantize weights to block formats."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.problem.operands.packed_weight import FLOAT8_NAMES, PackedWeight
from jax_tcgemm.products.arguments import as_floating, check_flag
from jax_tcgemm.quantization.pack import pack

# The largest number of float4_e2m1fn.
_LARGEST = 6.0
# Of float8_e4m3fn.
_LARGEST_SCALE, _SMALLEST_SCALE = 448.0, 2.0**-9
# The smallest scale of a weight: its product with every block scale is a normal float32.
_SMALLEST_COLUMN_SCALE = 2.0**-117
# Middles between two numbers of float4_e2m1fn, the smaller or the larger of which has an even code.
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def pack_mxfp4(w, *, stacked: bool = False) -> PackedWeight:
    """Quantize a weight to MXFP4 and pack it.

        scale[g, n] = 2^(floor(log2(max over k in g of abs(w[k, n]))) - 2)
        q[k, n] = float4_e2m1fn(w[k, n] / scale[k // 32, n])

    Args:
      w: array of a real floating-point dtype, of shape (k, ...), usually (k, n), or (k, 2, n) for
        `gated_linear`. k must be a multiple of 32.
      stacked: whether the first dimension of w stacks expert weights, so that k is the second.

    Returns:
      A `PackedWeight` of the shape of w, with group_size 32 and scales of float8_e8m0fnu.

    Raises:
      TypeError: if w is not real floating point, or stacked is not a bool.
      ValueError: if k is not a multiple of 32, w has too few dimensions or no elements or, where
        values are known, is not finite.

    Numerics:
      - Scales follow the OCP Microscaling Formats specification, version 1.0, section 6.3.
        Exponents are at least -127.
      - Quotients are exact, and rounded to nearest, ties to even. Their magnitudes are below 8;
        those above 6 become 6.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> w = jax_tcgemm.pack_mxfp4(jnp.linspace(-1, 1, 64).reshape(32, 2))
      >>> w.shape, w.unpack().scale.tolist(), w.dequantize()[0].tolist()
      ((32, 2), [[0.25, 0.25]], [-1.0, -1.0])
    """
    op = "pack_mxfp4"
    quotients, scale = _mx(_blocks(op, w, stacked, 32), 1 + stacked, _LARGEST)
    return pack(op, _merge_blocks(_codes(quotients), stacked), scale, None, 32, "float4_e2m1fn")


def pack_mxfp8(w, *, dtype="float8_e4m3fn", stacked: bool = False) -> PackedWeight:
    """Quantize a weight to MXFP8 and pack it.

        scale[g, n] = 2^(floor(log2(max over k in g of abs(w[k, n]))) - e)
        q[k, n] = dtype(w[k, n] / scale[k // 32, n])

    where e is the exponent of the dtype's largest power of two, 8 for float8_e4m3fn and 15 for
    float8_e5m2.

    Args:
      w: array of a real floating-point dtype, of shape (k, ...), usually (k, n), or (k, 2, n) for
        `gated_linear`. k must be a multiple of 32.
      dtype: "float8_e4m3fn" or "float8_e5m2".
      stacked: whether the first dimension of w stacks expert weights, so that k is the second.

    Returns:
      A `PackedWeight` of the shape of w, with group_size 32 and scales of float8_e8m0fnu.

    Raises:
      TypeError: if w is not real floating point, dtype is another one, or stacked is not a bool.
      ValueError: if k is not a multiple of 32, w has too few dimensions or no elements or, where
        values are known, is not finite.

    Numerics:
      - Scales follow the OCP Microscaling Formats specification, version 1.0, section 6.3.
        Exponents are at least -127.
      - Quotients are exact, and rounded to nearest, ties to even. Magnitudes above the dtype's
        largest number, 448 or 57344, become that number.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> w = jax_tcgemm.pack_mxfp8(jnp.linspace(-1, 1, 64).reshape(32, 2))
      >>> w.shape, w.unpack().scale.tolist(), w.dequantize()[0].tolist()
      ((32, 2), [[0.00390625, 0.00390625]], [-1.0, -0.9375])
    """
    op = "pack_mxfp8"
    name = None
    with contextlib.suppress(TypeError):
        name = jnp.dtype(dtype).name
    if name not in FLOAT8_NAMES:
        raise TypeError(f"{op}: dtype must be {' or '.join(FLOAT8_NAMES)}, got {dtype=}")
    largest = float(jnp.finfo(name).max)
    quotients, scale = _mx(_blocks(op, w, stacked, 32), 1 + stacked, largest)
    q = jnp.clip(quotients, -largest, largest).astype(name)
    return pack(op, _merge_blocks(q, stacked), scale, None, 32, name)


def pack_nvfp4(w, *, stacked: bool = False) -> PackedWeight:
    """Quantize a weight to NVFP4 and pack it.

        column_scale = max(abs(w)) / (6 * 448)
        scale[g, n] = float8_e4m3fn(max over k in g of abs(w[k, n]) / (6 * column_scale))
        q[k, n] = float4_e2m1fn(w[k, n] / (scale[k // 16, n] * column_scale))

    Args:
      w: array of a real floating-point dtype, of shape (k, ...), usually (k, n), or (k, 2, n) for
        `gated_linear`. k must be a multiple of 16.
      stacked: whether the first dimension of w stacks expert weights, so that k is the second. Each
        expert has a column_scale of its own.

    Returns:
      A `PackedWeight` of the shape of w, with group_size 16, scales of float8_e4m3fn and column
      scales.

    Raises:
      TypeError: if w is not real floating point, or stacked is not a bool.
      ValueError: if k is not a multiple of 16, w has too few dimensions or no elements or, where
        values are known, is not finite.

    Numerics:
      - All is computed in float32. Scales and codes are rounded to nearest, ties to even;
        magnitudes above 6 become 6.
      - Scales are at least 2^-9, the smallest positive number of float8_e4m3fn, and column_scale at
        least 2^-117.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> w = jax_tcgemm.pack_nvfp4(jnp.linspace(-1, 1, 64).reshape(32, 2))
      >>> w.shape, w.unpack().scale[0].tolist(), w.dequantize()[0].tolist()
      ((32, 2), [448.0, 432.0], [-1.0, -0.964844])
    """
    op = "pack_nvfp4"
    q, scale, column_scale = _nvfp4(_blocks(op, w, stacked, 16), 1 + stacked)
    how = {"column_scale": column_scale}
    return pack(op, _merge_blocks(q, stacked), scale, None, 16, "float4_e2m1fn", **how)


def _blocks(op: str, w, stacked: bool, size: int) -> jax.Array:
    """A checked weight in float32, of shape (..., groups, size, columns...)."""
    w, axis = as_floating(op, "w", w), int(check_flag(op, "stacked", stacked))
    if w.ndim < 2 + axis or 0 in w.shape:
        raise ValueError(
            f"{op}: w must have {2 + axis} dimensions at least and an element with {stacked=}, got "
            f"w.shape={w.shape}; it is ({'e, ' * axis}k, n)"
        )
    k = w.shape[axis]
    if k % size:
        raise ValueError(
            f"{op}: k must be a multiple of {size}, got k={k} of w.shape={w.shape}; fill it up "
            "with rows of zeros"
        )
    w = w.astype(jnp.float32)
    if not isinstance(w, jax.core.Tracer):
        with jax.ensure_compile_time_eval():
            is_finite = bool(jnp.all(jnp.isfinite(w)))
        if not is_finite:
            raise ValueError(
                f"{op}: w must be finite in float32, got w with NaN or infinity; replace these"
            )
    return w.reshape(*w.shape[:axis], k // size, size, *w.shape[axis + 1 :])


def _merge_blocks(blocks, stacked: bool):
    """Reshape (..., groups, size, columns...) to (..., k, columns...)."""
    return lax.collapse(blocks, int(stacked), int(stacked) + 2)


@functools.partial(jax.jit, static_argnames=("axis", "limit"), inline=True)
def _mx(blocks, axis: int, limit: float):
    """Divide blocks by their scales; `limit` is the largest number of the elements' dtype.

    Returns:
      The quotients in float32, and the scales in float8_e8m0fnu. Rows of blocks are along `axis`.
    """
    largest = abs(blocks).max(axis)
    # By bits, exactly: exponents of subnormal numbers are below -127 less the largest one.
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - int(math.log2(limit))
    exponent = jnp.maximum(exponent, 0)  # Plus 127, as float8_e8m0fnu has it.
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    scale = jnp.where(jnp.isfinite(largest), exponent, 255).astype(jnp.uint8)
    scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    return blocks * jnp.expand_dims(inverse, axis), scale


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def _nvfp4(blocks, axis: int):
    """Codes, scales of blocks of which the rows are along an axis, and scales of whole weights."""
    largest = abs(blocks).max(axis)
    whole = largest.max(range(axis - 1, largest.ndim))
    whole = jnp.maximum(whole / (_LARGEST * _LARGEST_SCALE), _SMALLEST_COLUMN_SCALE)
    column_scale = whole.reshape(*whole.shape, *[1] * (largest.ndim - axis + 1))
    scale = largest / (_LARGEST * column_scale)
    scale = jnp.clip(scale, _SMALLEST_SCALE, _LARGEST_SCALE).astype(jnp.float8_e4m3fn)
    of_block = jnp.expand_dims(scale.astype(jnp.float32) * column_scale, axis)
    return _codes(blocks / of_block), scale, whole


def _codes(x) -> jax.Array:
    """The codes of numbers in float32, rounded to nearest, ties to even, with saturation."""
    magnitude, code = abs(x), jnp.signbit(x).astype(jnp.uint8) << 3
    for middle in _TIES_DOWN:
        code += (magnitude > middle).astype(jnp.uint8)
    for middle in _TIES_UP:
        code += (magnitude >= middle).astype(jnp.uint8)
    return code
