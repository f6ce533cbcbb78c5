"""Products with packed weights, and these as arrays, on one device.

`product`, `grouped_product` and `weight` carry a plan of request.py out.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.device import xla_dot
from jax_tcgemm.device.call import call
from jax_tcgemm.device.request import Plan
from jax_tcgemm.problem.packed_weight import (
    TILE,
    PackedFormat,
    PackedWeight,
    dequantized,
    stacked_dequantized,
)


def product(rows: Sequence[jax.Array], w: PackedWeight, dtype, plan: Plan) -> jax.Array:
    """Carries out a plan of form product.

    Args:
      rows: x, of shape (..., k), and of 8-bit floats, which are none of XLA's, scales (...).
      w: the weight.
      dtype: of the result.
      plan: the plan.

    Returns:
      The product, of shape (..., tiles, 16).
    """
    x, tiles = rows[0], w.values.shape[0]
    if plan.runs_by_xla:
        out = xla_dot.dot_general(
            x,
            dequantized(w, x.dtype),
            (((x.ndim - 1,), (0,)), ((), ())),
            platform=plan.platform,
            preferred_element_type=jnp.float32,
        ).astype(dtype)
        return out.reshape(*x.shape[:-1], tiles, TILE)
    m = math.prod(x.shape[:-1])
    flat = [x.reshape(m, x.shape[-1]), *(scales.reshape(m) for scales in rows[1:])]
    operands = [*flat, *_operands(w)]
    result = jax.ShapeDtypeStruct((m, tiles * TILE), dtype)
    (out,) = call(plan.problem, plan.choice, operands, [result])
    return out.reshape(*x.shape[:-1], tiles, TILE)


def grouped_product(
    rows: Sequence[jax.Array], w: PackedWeight, group_sizes, group_offset, dtype, plan: Plan
) -> jax.Array:
    """Carries out a plan of form grouped that is not XLA's.

    Args:
      rows: as in `product`, x of shape (m, k), sorted by expert.
      w: the weights of the experts.
      group_sizes: int32 of shape (s,).
      group_offset: int32 of shape (1,).
      dtype: of the result.
      plan: the plan.

    Returns:
      The product, of shape (m, tiles, 16).
    """
    tiles = w.values.shape[1]
    result = jax.ShapeDtypeStruct((len(rows[0]), tiles * TILE), dtype)
    operands = [*rows, *_operands(w), group_sizes, group_offset]
    (out,) = call(plan.problem, plan.choice, operands, [result])
    return out.reshape(-1, tiles, TILE)


def weight(w: PackedWeight, dtype, plan: Plan) -> jax.Array:
    """Carries out a plan of form weight: the transpose, of shape (*stacked, tiles, 16, k)."""
    shape = (*w.values.shape[:-2], TILE, w.format.k)
    if plan.runs_by_xla:
        return jnp.swapaxes(stacked_dequantized(w, dtype), -1, -2).reshape(shape)
    return call(plan.problem, plan.choice, _operands(w), [jax.ShapeDtypeStruct(shape, dtype)])[0]


def _operands(w: PackedWeight) -> list[jax.Array]:
    return [*(getattr(w, name) for name in w.format.shapes), *table_of(w.format)]


def table_of(form: PackedFormat) -> list[jax.Array]:
    """The operand that comes after the arrays of a weight, if there is one."""
    return [] if not form.has_lookup else [jnp.asarray(np.array(form.table, np.float32))]
