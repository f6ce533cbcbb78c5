"""Functions of stacks of matrices whose devices compute whole matrices."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.sharding import shardings
from jax_tcgemm.sharding.layout import canonical_spec
from jax_tcgemm.sharding.partitioning import resharded


def of_whole_matrices(function: Callable, x) -> jax.Array:
    """Apply a function to a stack of matrices; no device computes a part of a matrix.

    If explicit mesh axes shard rows or columns, they shard the largest batch dimension instead
    while the function is computed. The dimension is padded with zeros to a multiple of the shards.
    Without batch dimensions, each of these devices computes the whole matrix.

    Args:
      function: function of an array of shape (..., m, n) whose result has the same shape and
        depends on each matrix separately.
      x: array of shape (..., m, n).

    Returns:
      The function's result, sharded like x.
    """
    sharding = shardings.explicit(x)
    if sharding is None:
        return function(x)
    spec, sizes = canonical_spec(sharding.spec, x.ndim), sharding.mesh.shape
    if not any(spec[-2:]):
        return function(x)

    def over(spec):
        return NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in spec)))

    if x.ndim == 2:
        return resharded(function(resharded(x, over(((), ())))), sharding)

    def num_shards(dim, axes=()):
        return math.prod(sizes[axis] for axis in spec[dim] + axes)

    dim = max(range(x.ndim - 2), key=lambda dim: x.shape[dim] / num_shards(dim))
    extent = x.shape[dim]
    padding = -extent % num_shards(dim, sum(spec[-2:], ()))
    steps = [spec]
    if padding:
        # Only a dimension that is not sharded can have any length.
        steps = [_replaced(spec, dim, ()), spec]
        widths = [(0, padding if i == dim else 0) for i in range(x.ndim)]
        x = jnp.pad(resharded(x, over(steps[0])), widths)
    # One dimension after the other, so that each step is an all-to-all.
    for matrix_dim in (x.ndim - 2, x.ndim - 1):
        last = steps[-1]
        steps.append(_replaced(_replaced(last, dim, last[dim] + spec[matrix_dim]), matrix_dim, ()))
    for step in steps[1:]:
        x = resharded(x, over(step))
    x = function(x)
    for step in reversed(steps):
        x = resharded(x, over(step))
    if padding:
        x = lax.slice_in_dim(x, 0, extent, axis=dim)
    return resharded(x, sharding)


def _replaced(spec: tuple, dim: int, axes: tuple) -> tuple:
    return (*spec[:dim], axes, *spec[dim + 1 :])
