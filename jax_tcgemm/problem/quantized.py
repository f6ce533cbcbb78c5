"""Quantized arrays: values of few bits, and what they are to be multiplied by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_tcgemm.problem.dtypes import wide_dtype

_FIELDS = ("qvalue", "scale", "zero_point", "qtype")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "scale", "zero_point"),
    meta_fields=("qtype", "block"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """An array as values of few bits and scales, as `quantize` makes it.

        array ~ (qvalue - zero_point) * scale

    where scales are repeated to the shape of what they scale. It is a pytree, and has the fields of
    Qwix's `QArray`: products take either.

    Attributes:
      qvalue: the values, of the shape of the array.
      scale: floating-point array of as many dimensions. Along each, a scale is for
        `qvalue.shape[i] // scale.shape[i]` elements.
      zero_point: None, or integers of the shape of scale or of any other that repeats so.
      qtype: what the values are meant to be; None takes their dtype.
      block: None, or the extents of blocks along the last dimensions, where shapes do not say them,
        since a last block is short.

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
        """That of the array."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self.qvalue.ndim

    @property
    def tile(self) -> tuple[int, ...]:
        """The extents of a block of every dimension, of which the last may be short."""
        whole = tuple(n // max(own, 1) for n, own in zip(self.shape, self.scale.shape, strict=True))
        if self.block is None:
            return whole
        block = (1,) * (self.ndim - len(self.block)) + self.block
        # What one scale is for, or has a scale for each, needs not be said.
        says = [own in (1, n) for n, own in zip(self.shape, self.scale.shape, strict=True)]
        return tuple(w if is_said else b for w, b, is_said in zip(whole, block, says, strict=True))

    @property
    def dtype(self):
        """That of the array once it is dequantized."""
        return self.scale.dtype

    @property
    def mT(self) -> "QuantizedArray":  # noqa: N802
        """With the last two dimensions exchanged."""
        block = self.block and (*(1,) * (2 - len(self.block)), *self.block)
        block = block and (*block[:-2], block[-1], block[-2])
        arrays = (self.qvalue, self.scale, self.zero_point)
        return QuantizedArray(*(None if x is None else x.mT for x in arrays), self.qtype, block)


def is_quantized(x) -> bool:
    """Whether something is a quantized array, ours or another library's."""
    return not isinstance(x, jax.Array) and all(hasattr(x, name) for name in _FIELDS)


def spread(factors: jax.Array, shape: tuple[int, ...], tile=None) -> jax.Array:
    """One for each element along dimensions that have several; 1 stays where one is for all.

    Args:
      factors: scales or zero points of blocks.
      shape: of what they are for.
      tile: the extents of blocks; None where `shape // factors.shape` are them.
    """
    for axis, extent in enumerate(shape):
        if (own := factors.shape[axis]) not in (1, extent):
            size = extent // own if tile is None else tile[axis]
            factors = spread_along(axis, factors, extent, size)
    return factors


def spread_along(axis: int, factors: jax.Array, extent: int, size: int) -> jax.Array:
    """One for each of `extent` elements of a dimension, of blocks of `size`."""
    factors = repeated(axis, factors, size)
    if factors.shape[axis] == extent:
        return factors
    return jax.lax.slice_in_dim(factors, 0, extent, axis=axis)


def repeated(axis: int, x: jax.Array, size: int) -> jax.Array:
    """`jnp.repeat`, also along a dimension that explicit mesh axes divide."""
    before, number, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, number, size, *after))
    return x.reshape(*before, number * size, *after)


@functools.partial(jax.jit, inline=True)
def dequantized(x: QuantizedArray) -> jax.Array:
    """The array, computed in float32 at least and rounded once to the dtype of the scales."""
    wide = wide_dtype(x.scale.dtype)
    values = x.qvalue.astype(wide)
    if x.zero_point is not None:
        values -= spread(x.zero_point.astype(wide), x.shape, x.block)
    return (values * spread(x.scale.astype(wide), x.shape, x.block)).astype(x.scale.dtype)
