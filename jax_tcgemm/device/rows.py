"""Sums and products of rows on one device: `sums` and `dots` carry a plan of request.py out."""

import jax
import jax.numpy as jnp

from jax_tcgemm.device.call import call
from jax_tcgemm.device.request import Plan
from jax_tcgemm.device.segment_sums import segment_sums
from jax_tcgemm.problem.dtypes import DTYPES, wide_dtype


def sums(a, sources, targets, weights=None, *, plan: Plan, num_targets: int, pattern) -> jax.Array:
    """Carries out a plan of form sums.

    Args:
      a: the rows.
      sources: of each pair, the row.
      targets: of each pair, the sum.
      weights: of each pair, or None.
      plan: the plan.
      num_targets: number of sums.
      pattern: what is known of the targets, as the primitive says it.
    """
    if plan.runs_by_xla:
        return _sums_by_xla(a, sources, targets, weights, num_targets=num_targets, pattern=pattern)
    order, starts = _sorted_by_target(targets, num_targets, pattern)
    vectors = (
        [sources] if weights is None else [sources, weights.astype(DTYPES[plan.problem.compute])]
    )
    if order is not None:
        vectors = [x[order] for x in vectors]
    indices, *weights = vectors
    return _call(plan, [a, indices, starts, *weights], (num_targets, plan.problem.n))


def dots(a, b, indices, b_indices, *, plan: Plan) -> jax.Array:
    """Carries out a plan of form dots."""
    if plan.runs_by_xla:
        return _dots_by_xla(a, b, indices, b_indices)
    return _call(plan, [a, b, indices, b_indices], (plan.problem.pairs,))


def _call(plan: Plan, operands, shape) -> jax.Array:
    result = jax.ShapeDtypeStruct(shape, DTYPES[plan.problem.out_dtype])
    return call(plan.problem, plan.choice, operands, [result])[0]


def take(x, indices):
    """The rows x[indices[i]]; zeros where there is no such row."""
    if x.shape[0] == 0:  # Which JAX takes nothing from, out of range or not.
        return jnp.zeros((*indices.shape, *x.shape[1:]), x.dtype)
    indices = jnp.where(indices < 0, x.shape[0], indices)
    return x.at[indices].get(mode="fill", fill_value=0)


def _sums_by_xla(a, sources, targets, weights=None, *, num_targets, pattern):
    rows = take(a, sources).astype(wide_dtype(a.dtype))
    if weights is not None:
        # Not 0 * weight where there is no row, for the weight may be infinite.
        inside = (sources >= 0) & (sources < a.shape[0])
        rows = rows * jnp.where(inside, weights, 0).astype(rows.dtype)[:, None]
    if isinstance(pattern, int):
        out = jnp.sum(jnp.reshape(rows, (num_targets, pattern, a.shape[1])), 1)
        return out.astype(a.dtype)
    if pattern == "unique":
        out = jnp.zeros((num_targets, a.shape[1]), rows.dtype)
        targets = jnp.where(targets < 0, num_targets, targets)
        return out.at[targets].add(rows, mode="drop", unique_indices=True).astype(a.dtype)
    return segment_sums(rows, targets, num_targets).astype(a.dtype)


def _dots_by_xla(a, b, a_indices, b_indices):
    wide = wide_dtype(a.dtype)
    return jnp.sum(take(a, a_indices).astype(wide) * take(b, b_indices).astype(wide), -1)


def _sorted_by_target(targets, num_targets: int, pattern):
    """The order of the pairs by target, None where they lie in it, and where each target begins."""
    num_pairs = targets.shape[0]
    if isinstance(pattern, int):
        return None, jnp.arange(num_targets + 1, dtype=jnp.int32) * pattern
    inside = (targets >= 0) & (targets < num_targets)
    targets = jnp.where(inside, targets, num_targets)
    counts = jnp.zeros((num_targets,), jnp.int32).at[targets].add(1, mode="drop")
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    if pattern == "unique":
        pairs = jnp.arange(num_pairs, dtype=jnp.int32)
        position = jnp.where(inside, starts[targets], num_pairs)
        return jnp.zeros_like(pairs).at[position].set(pairs, mode="drop"), starts
    return jnp.argsort(targets, stable=True).astype(jnp.int32), starts
