"""Sizes and offsets of groups, as arguments of grouped products."""

import functools

import jax
import jax.numpy as jnp

from jax_tcgemm.products.arguments import (
    ShapeError,
    as_integers,
)


def as_sizes(op: str, x) -> jax.Array:
    """Return the group_sizes of a grouped product as integers with at least one dimension."""
    x = as_integers(op, "group_sizes", x)
    if x.ndim == 0:
        raise ShapeError(
            f"{op}: group_sizes must have at least one dimension, got group_sizes.shape=(); "
            "pass one size for each group"
        )
    return x


@functools.partial(jax.jit, inline=True)
def _no_offset() -> jax.Array:
    """Make the offset 0 on the device. An eager constant is a transfer, which may be forbidden."""
    return jnp.zeros((1,), jnp.int32)


def as_offset(op: str, group_offset) -> jax.Array:
    """Return the group_offset of a grouped product as an array of one integer."""
    if group_offset is None:
        return _no_offset()
    offset = as_integers(op, "group_offset", group_offset)
    if offset.size != 1:
        raise ShapeError(
            f"{op}: group_offset must be one integer, got group_offset.shape={offset.shape}; "
            "pass an array of shape (1,)"
        )
    return jnp.reshape(offset, (1,))
