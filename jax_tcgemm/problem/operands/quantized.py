"""Quantized arrays: values of few bits with block scales."""

import contextlib
import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.dtypes import wide_dtype

_FIELDS = ("qvalue", "scale", "zero_point", "qtype")


class ValueKind(enum.Enum):
    """Kinds of numbers that the values of a quantized array stand for, according to its qtype."""

    INTEGER = "integers"
    FLOAT = "floating-point numbers"
    NF4 = "entries of the NF4 codebook"


# Qwix's own qtypes, which it names beside dtypes: integers of fewer bits than their storage, floats
# with the block scales of a standard format, and a codebook.
_NAMES_OF_QWIX = {
    **dict.fromkeys(("int2", "int3", "int5", "int6", "int7"), ValueKind.INTEGER),
    **dict.fromkeys(("mxfp8", "mxfp4", "nvfp4"), ValueKind.FLOAT),
    "nf4": ValueKind.NF4,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "scale", "zero_point"),
    meta_fields=("qtype", "block"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """Array quantized to values of few bits and scales, as `quantize` returns it.

        array ~ (qvalue - zero_point) * scale

    where scales are repeated to the shape of the values. A QuantizedArray is a pytree with the
    fields of Qwix's `QArray`; products take either.

    Attributes:
      qvalue: the values, with the shape of the array.
      scale: floating-point array with as many dimensions. Along dimension i, each scale is for
        `qvalue.shape[i] // scale.shape[i]` elements.
      zero_point: None, or integers of any shape that repeats to that of the values like `scale`.
      qtype: nominal dtype of the values, or a name of Qwix, such as "int3" or "nf4"; None takes the
        dtype of `qvalue`.
      block: None, or the block shape along the last dimensions, which is needed where the last
        block of a dimension is short.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q = jax_tcgemm.quantize(jnp.ones((256, 300)), block=(128, 128))
      >>> q.shape, q.scale.shape, q.block
      ((256, 300), (2, 3), (128, 128))
      >>> jax_tcgemm.matmul(q, q.mT).dtype
      dtype('float32')
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    qtype: object = None
    block: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.qtype is None:
            object.__setattr__(self, "qtype", self.qvalue.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.qvalue.ndim

    @property
    def tile(self) -> tuple[int, ...]:
        """Block size along every dimension; the last block of a dimension may be short."""
        whole = tuple(n // max(own, 1) for n, own in zip(self.shape, self.scale.shape, strict=True))
        if self.block is None:
            return whole
        block = (1,) * (self.ndim - len(self.block)) + self.block
        # Dimensions with one scale, or with a scale for each element, do not depend on `block`.
        says = [own in (1, n) for n, own in zip(self.shape, self.scale.shape, strict=True)]
        return tuple(w if is_said else b for w, b, is_said in zip(whole, block, says, strict=True))

    @property
    def dtype(self):
        """Dtype of the dequantized array: that of the scales, or float32 if scales have 8 bits."""
        return dequantized_dtype(self.scale.dtype)

    @property
    def mT(self) -> "QuantizedArray":  # noqa: N802
        """Transpose of the last two dimensions."""
        block = self.block and (*(1,) * (2 - len(self.block)), *self.block)
        block = block and (*block[:-2], block[-1], block[-2])
        arrays = (self.qvalue, self.scale, self.zero_point)
        return QuantizedArray(*(None if x is None else x.mT for x in arrays), self.qtype, block)


def is_quantized(x) -> bool:
    """Return whether `x` is a quantized array, ours or another library's."""
    return not isinstance(x, jax.Array) and all(hasattr(x, name) for name in _FIELDS)


def value_kind(op: str, name: str, qtype, dtype) -> ValueKind:
    """Return what the values of a quantized array stand for.

    Args:
      op: the public function, for messages.
      name: name of the array, for messages.
      qtype: qtype of the array: a dtype, the name of one, a name of Qwix, or None for `dtype`.
      dtype: dtype of the values.

    Raises:
      TypeError: if the qtype is none of these, or a dtype of other than real numbers.
    """
    if isinstance(qtype, str) and qtype in _NAMES_OF_QWIX:
        return _NAMES_OF_QWIX[qtype]
    # NumPy also parses text as a list of fields, and then may raise a SyntaxError.
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        nominal = np.dtype(dtype if qtype is None else qtype)
        if jnp.issubdtype(nominal, jnp.integer):
            return ValueKind.INTEGER
        if jnp.issubdtype(nominal, jnp.floating):
            return ValueKind.FLOAT
    raise TypeError(
        f"{op}: {name}.qtype must be an integer or floating-point dtype, or "
        f"{', '.join(_NAMES_OF_QWIX)}, got {name}.qtype={qtype!r}; set it to the dtype of the "
        "values, or dequantize the array first"
    )


def spread(factors: jax.Array, shape: tuple[int, ...], tile=None) -> jax.Array:
    """Repeat block scales or zero points to one for each element; dimensions of size 1 stay.

    Args:
      factors: scales or zero points of blocks.
      shape: shape of the quantized array.
      tile: block shape; None takes `shape // factors.shape`.
    """
    for axis, extent in enumerate(shape):
        if (own := factors.shape[axis]) not in (1, extent):
            size = extent // own if tile is None else tile[axis]
            factors = spread_along(axis, factors, extent, size)
    return factors


def spread_along(axis: int, factors: jax.Array, extent: int, size: int) -> jax.Array:
    """Repeat scales of blocks of `size` along an axis, to one for each of `extent` elements."""
    factors = repeated(axis, factors, size)
    if factors.shape[axis] == extent:
        return factors
    return jax.lax.slice_in_dim(factors, 0, extent, axis=axis)


def repeated(axis: int, x: jax.Array, size: int) -> jax.Array:
    """Repeat like `jnp.repeat`, also along a dimension that is sharded over explicit mesh axes."""
    before, number, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, number, size, *after))
    return x.reshape(*before, number * size, *after)


def dequantized_dtype(scale_dtype) -> np.dtype:
    """Return the dtype of an array with such scales: theirs, or float32 if they have 8 bits."""
    dtype = np.dtype(scale_dtype)
    return np.dtype(np.float32) if dtype.itemsize == 1 else dtype


@functools.partial(jax.jit, inline=True)
def dequantized(x: QuantizedArray) -> jax.Array:
    """Dequantize in float32 or wider, and round once to the dtype of the array."""
    wide = wide_dtype(x.scale.dtype)
    values = x.qvalue.astype(wide)
    if x.zero_point is not None:
        values -= spread(x.zero_point.astype(wide), x.shape, x.block)
    values = values * spread(x.scale.astype(wide), x.shape, x.block)
    return values.astype(dequantized_dtype(x.scale.dtype))
