"""Public `quantize` and `dequantize`."""

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
from jax_tcgemm.problem.operands.quantize import form_of
from jax_tcgemm.problem.operands.quantized import QuantizedArray, dequantized, is_quantized, spread
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
    """Quantize an array to 8 bits, with scales computed from the largest magnitudes.

        scale = max(abs(x)) / max(dtype),  qvalue = round(x / scale),  so that x ~ qvalue * scale

    The largest magnitude is taken over all of x, along an axis, or over each block. `matmul`,
    `dot_general`, `linear`, `gated_linear`, `ragged_dot` and `tensor.einsum` accept the result.

    Args:
      x: array of a real floating-point dtype.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      axis: the axis or axes along which the largest magnitude is taken. -1 gives per-row scales.
        None gives one per-tensor scale, or block scales if `block` is given.
      block: None, or the block sizes along the last dimensions, such as (1, 128) or (128, 128).
        Earlier dimensions have one scale per index. The last block of a dimension may be shorter.
      with_transpose: whether to also quantize x with its last two dimensions transposed. The
        transpose has its own scales; for the transpose, `axis` and `block` refer to its own
        dimensions. Gradients need such a transpose, because gradients contract other dimensions
        than the layer. A GPU reads x once for both arrays.
      implementation: "quantize" or "xla". None selects an implementation.
      config: name of a config of that implementation. None selects a config.

    Returns:
      A `QuantizedArray`, or two with with_transpose. Scales are float32. If all magnitudes of a
      block are zero, or x has no elements, the scale is the smallest normal number. If a block
      contains NaN, its scale is NaN; if a block contains an infinity, its scale is infinite. All
      elements of such a block become NaN when dequantized or multiplied, also for int8.

    Raises:
      TypeError: if x is not real floating point, dtype is another dtype, or an axis or block size
        is not an integer.
      ValueError: if x lacks the axis, a block size is below 1, there are more block sizes than
        dimensions, axis and block are both given, or x has fewer than two dimensions and
        with_transpose is set. Also if the implementation is unknown or cannot run the call.

    Numerics:
      - x is multiplied by the inverse of its scale in float32 and rounded to nearest, ties to even.
        int8 uses -127 to 127.
      - All implementations give the same bits, except for NaN and subnormals.
      - Derivatives are straight-through and treat scales as constants. A derivative of an 8-bit
        float has 8 bits, so the loss scaling determines whether derivatives underflow. Integers
        have no derivatives. `Fp8DotGeneral` trains without these limits.

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
    """Dequantize a quantized array.

        out = (qvalue - zero_point) * scale

    Args:
      x: a `QuantizedArray`, or an object with its fields, such as Qwix's `QArray`.

    Returns:
      An array of the shape of x.qvalue and the dtype of x.scale.

    Raises:
      TypeError: if x is not a quantized array of real numbers.
      ValueError: if the shape of scales or zero points does not match the values.

    Numerics:
      The computation is in float32 or wider, and the result is rounded once.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> jax_tcgemm.dequantize(jax_tcgemm.quantize(jnp.array([3.0, -1.0]), "int8"))
      Array([ 3.      , -0.992126], dtype=float32)
    """
    op = "dequantize"
    if not is_quantized(x):
        raise TypeError(
            f"{op}: x must be a quantized array, got x of type {type(x).__name__}; use "
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
