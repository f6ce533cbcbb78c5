"""Random problems as pairs of expressions, with a reference, and draws of their sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One expression, by this library's default choice and by plain JAX.

    Attributes:
      kind: a key of `KINDS`.
      text: shapes and dtypes, for people.
      operands: shapes and dtypes of the operands.
      ours: function of the operands that calls the library.
      plain: function of the operands in plain JAX, as a user would write it.
      reference: function of float64 (complex128, int64) operands on the host.
      tolerance: largest accepted max |result - reference| / max |reference|.
      flops: multiplications and additions.
      draw: function of a key that makes the operands; None draws standard normal numbers, and
        integers over their whole range.
    """

    kind: str
    text: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    ours: Callable
    plain: Callable
    reference: Callable
    tolerance: float
    flops: float
    draw: Callable | None = None

    @property
    def input_bytes(self) -> int:
        """Bytes of the operands."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in self.operands)


class Random:
    """Draws extents, layouts and dtypes."""

    def __init__(self, seed: Sequence[int]):
        self._generator = np.random.default_rng(seed)

    def extent(self, least: int, most: int, multiple: int = 1) -> int:
        """A log-uniform multiple between two bounds."""
        drawn = math.exp(self._generator.uniform(math.log(least), math.log(most)))
        return max(round(drawn / multiple), 1) * multiple

    def one_of(self, *values):
        """One of some values."""
        return values[self._generator.integers(len(values))]


def struct(shape: Sequence[int], dtype) -> jax.ShapeDtypeStruct:
    """Return the type of an array."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def tolerance_of(in_dtype, out_dtype, k: int, *, tf32: bool = False) -> float:
    """One rounding of the result, one of TF32 operands, accumulation that grows with sqrt(K)."""
    if jnp.issubdtype(out_dtype, jnp.integer):
        return 0.0
    is_double = jnp.dtype(in_dtype).name in ("float64", "complex128")
    accumulator = float(jnp.finfo(jnp.float64 if is_double else jnp.float32).eps)
    rounding = float(jnp.finfo(out_dtype).eps)
    return rounding + (2.0**-10 if tf32 else 0.0) + 16 * accumulator * math.sqrt(max(k, 1))


def scaled_draw(operands: Sequence[jax.ShapeDtypeStruct], k: int) -> Callable:
    """Draws standard normal numbers, the second operand's divided by sqrt(k)."""

    def draw(key):
        drawn = [
            jax.random.normal(each, x.shape, x.dtype)
            for each, x in zip(jax.random.split(key, len(operands)), operands, strict=True)
        ]
        drawn[1] = (drawn[1] * k**-0.5).astype(operands[1].dtype)
        return drawn

    return jax.jit(draw)
