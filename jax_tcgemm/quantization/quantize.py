"""The public `quantize` and `dequantize`."""

import functools
from collections.abc import Sequence
from operator import index

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.quantize import scales_of
from jax_tcgemm.primitives import quantize as primitive
from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.quantize import form_of
from jax_tcgemm.problem.quantized import QuantizedArray, dequantized, is_quantized, spread
from jax_tcgemm.products.arguments import (
    as_floating,
    call_options,
    canonical_element_type,
    check_flag,
)
from jax_tcgemm.products.quantized import as_operand

_DTYPES = (*FLOAT8, np.dtype(np.int8))


def quantize(
    x,
    dtype=jnp.float8_e4m3fn,
    *,
    axis: int | Sequence[int] | None = None,
    block: Sequence[int] | None = None,
    with_transpose: bool = False,
    implementation: str | None = None,
    config: str | None = None,
) -> QuantizedArray | tuple[QuantizedArray, QuantizedArray]:
    """Rounds an array to 8 bits, with scales by the largest magnitudes.

        scale = max(abs(x)) / max(dtype),  qvalue = round(x / scale),  so that x ~ qvalue * scale

    with the largest magnitude of all of x, of its lines along an axis, or of its blocks. `matmul`,
    `dot_general`, `linear`, `gated_linear`, `ragged_dot` and `tensor.einsum` multiply the result.

    Args:
      x: array of a real floating-point dtype.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      axis: the axis or axes along which the largest magnitude is looked for, such as -1 for a scale
        for each row; None for one scale for all, or for blocks.
      block: None, or the extents of blocks along the last dimensions, such as (1, 128) or
        (128, 128); dimensions before them have a scale for each index. The last block of a
        dimension may be short.
      with_transpose: whether to make a second array, of x with its last two dimensions exchanged,
        which is quantised for itself: `axis` and `block` are of its own dimensions. For gradients,
        which contract what a layer does not. On a GPU x is read once for both.
      implementation: "quantize" or "xla"; None selects.
      config: of that implementation; None selects.

    Returns:
      A `QuantizedArray`; with_transpose, two of them. Scales are float32. Where x is zero
      throughout, or has no elements, they are as small as normal numbers are. Where
      there is a NaN the scale is NaN, and where there is an infinity it is infinite: all that has
      it is NaN once it is dequantised or multiplied, of int8, too.

    Raises:
      TypeError: for an x that is not real floating point, another dtype, or an axis or extents
        that are no integers.
      ValueError: for an axis that x does not have, extents below 1 or more of them than x has
        dimensions, an axis together with a block, an x of less than two dimensions that is to be
        transposed, and an implementation that does not exist or cannot run it.

    Numerics:
      Computed in float32, x times the inverse of its scale, and rounded to nearest, ties to even;
      int8 uses -127 to 127. The bits are the same whatever runs it, NaN and subnormals aside.
      Derivatives go straight through the rounding, and take the scales for constants:
      d qvalue = dx / scale. As everywhere in JAX they have the dtype of what they are of, so that
      those of 8-bit floats have 8 bits: what a loss is multiplied by decides whether they
      underflow. Integers have none. `Fp8DotGeneral` trains without either limit.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q = jax_tcgemm.quantize(jnp.array([[1.0, -7.0], [0.5, 0.25]]), axis=-1)
      >>> q.qvalue.tolist(), jax_tcgemm.dequantize(q).tolist()
      ([[64.0, -448.0], [448.0, 224.0]], [[1.0, -7.0], [0.5, 0.25]])
      >>> q, transposed = jax_tcgemm.quantize(jnp.ones((256, 512)), block=(1, 128),
      ...     with_transpose=True)
      >>> q.scale.shape, transposed.shape, transposed.scale.shape
      ((256, 4), (512, 256), (512, 2))
    """
    op = "quantize"
    options = call_options(op, implementation, config, kind="quantize")
    x = as_floating(op, "x", x)
    dtype = _dtype(op, dtype)
    shapes = [x.shape]
    if check_flag(op, "with_transpose", with_transpose):
        if x.ndim < 2:
            raise ValueError(
                f"{op}: x must have two dimensions at least for with_transpose=True, got x.shape="
                f"{x.shape}; add one of size 1"
            )
        shapes.append((*x.shape[:-2], x.shape[-1], x.shape[-2]))
    if block is not None:
        if axis is not None:
            raise ValueError(
                f"{op}: axis must be None for scales of blocks, got {axis=} and {block=}; a block "
                "of 1 has a scale for each index"
            )
        block = _block(op, block, x.shape)
        tiles = tuple((1,) * (x.ndim - len(block)) + block for _ in shapes)
    else:
        axes = _axes(op, axis, x.ndim)
        tiles = tuple(
            tuple(extent if i in axes else 1 for i, extent in enumerate(shape)) for shape in shapes
        )
    made = _values_and_scales(x, dtype, tiles, options)
    arrays = []
    for (values, scales), tile in zip(made, tiles, strict=True):
        numbers = zip(values.shape, scales.shape, tile, strict=True)
        is_short = any(own != 1 and own * size != extent for extent, own, size in numbers)
        arrays.append(QuantizedArray(values, scales, None, dtype, block if is_short else None))
    return tuple(arrays) if with_transpose else arrays[0]


def dequantize(x) -> jax.Array:
    """The array that a quantised one stands for.

        out = (qvalue - zero_point) * scale

    Args:
      x: a `QuantizedArray`, or anything with its fields, such as Qwix's `QArray`.

    Returns:
      An array of the shape of x.qvalue and the dtype of x.scale.

    Raises:
      TypeError: for what is no quantised array of real numbers.
      ValueError: for scales or zero points whose shape does not go with the values.

    Numerics:
      Computed in float32 at least, and rounded once.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> jax_tcgemm.dequantize(jax_tcgemm.quantize(jnp.array([3.0, -1.0]), "int8"))
      Array([ 3.      , -0.992126], dtype=float32)
    """
    op = "dequantize"
    if not is_quantized(x):
        raise TypeError(
            f"{op}: x must be a quantised array, got x of type {type(x).__name__}; use "
            "jax_tcgemm.quantize"
        )
    return dequantized(as_operand(op, "x", x))


def _dtype(op: str, dtype) -> np.dtype:
    try:
        canonical = canonical_element_type(op, dtype)
    except TypeError:
        canonical = None
    if canonical not in _DTYPES:
        raise TypeError(
            f"{op}: dtype must be {', '.join(map(str, FLOAT8))} or int8, got {dtype=}; see "
            "jax.numpy"
        )
    return canonical


def _axes(op: str, axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    try:
        own = tuple(map(index, axis)) if isinstance(axis, tuple | list) else (index(axis),)
    except TypeError:
        raise TypeError(
            f"{op}: axis must be an integer, several or None, got axis of type "
            f"{type(axis).__name__}; None takes one scale for all"
        ) from None
    if not own or not all(-ndim <= each < ndim for each in own):
        raise ValueError(
            f"{op}: axis must be among the {ndim} dimensions of x, got {axis=}; None takes one "
            "scale for all"
        )
    return tuple(each % ndim for each in own)


def _block(op: str, block, shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        own = tuple(map(index, block if isinstance(block, tuple | list) else (None,)))
    except TypeError:
        raise TypeError(
            f"{op}: block must be a tuple of integers or None, got block of type "
            f"{type(block).__name__}; such as (1, 128)"
        ) from None
    if not 0 < len(own) <= len(shape) or min(own) < 1:
        raise ValueError(
            f"{op}: block must have an extent of at least 1 for each of the last dimensions of x, "
            f"got {block=} for {len(shape)} dimensions; such as (1, 128)"
        )
    if not all(isinstance(extent, int) for extent in shape):
        raise ValueError(
            f"{op}: x must have dimensions of known extents for scales of blocks, got x.shape="
            f"{shape}; use axis"
        )
    return own


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _values_and_scales(x, dtype, tiles, options) -> list[tuple[jax.Array, jax.Array]]:
    """Values and scales of an array and, where there are tiles for it, of its transpose."""
    # With a dimension or two more where it has not two.
    more = (1,) * (2 - x.ndim)
    full, own = lax.reshape(x, (*more, *x.shape)), tuple((*more, *tile) for tile in tiles)
    given = []
    # One scale for a matrix is known when all of it has been read, which XLA does at once.
    if own[0][-2:] == full.shape[-2:] and form_of(full.shape, own[0]) not in ("lines", "blocks"):
        given.append(scales_of(full.astype(jnp.float32), dtype, own[0]))
    made = primitive.quantize(full, *given, dtype=dtype, tiles=own, options=options)
    pairs = (
        [(values, *given) for values in made] if given else zip(made[::2], made[1::2], strict=True)
    )
    return [
        (values.reshape(values.shape[len(more) :]), scales.reshape(scales.shape[len(more) :]))
        for values, scales in pairs
    ]


@_values_and_scales.defjvp
def _straight_through(dtype, tiles, options, primals, tangents):
    made, dx = _values_and_scales(*primals, dtype, tiles, options), tangents[0].astype(jnp.float32)
    moved = []
    for i, ((values, scales), tile) in enumerate(zip(made, tiles, strict=True)):
        if jnp.issubdtype(dtype, jnp.integer):
            dvalues = np.zeros(values.shape, jax.dtypes.float0)
        else:
            own = jnp.swapaxes(dx, -1, -2) if i else dx
            dvalues = (own / spread(scales, values.shape, tile)).astype(dtype)
        moved.append((dvalues, jnp.zeros_like(scales)))
    return made, moved
