"""Products with packed weights, and these as arrays, on one device.

`product` and `weight` carry a plan of request.py out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device.call import call
from jax_tcgemm.device.request import Plan
from jax_tcgemm.problem.packed_weight import TILE, PackedWeight, dequantized


def product(x: jax.Array, w: PackedWeight, dtype, plan: Plan) -> jax.Array:
    """Carries out a plan of form product.

    Args:
      x: of shape (..., k).
      w: the weight.
      dtype: of the result.
      plan: the plan.

    Returns:
      The product, of shape (..., tiles, 16).
    """
    tiles = w.values.shape[0]
    if plan.choice.implementation == selection.XLA:
        out = lax.dot_general(
            x,
            dequantized(w, x.dtype),
            (((x.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        ).astype(dtype)
        return out.reshape(*x.shape[:-1], tiles, TILE)
    rows = math.prod(x.shape[:-1])
    operands = [x.reshape(rows, x.shape[-1]), *_operands(w)]
    result = jax.ShapeDtypeStruct((rows, tiles * TILE), dtype)
    (out,) = call(plan.problem, plan.choice, operands, [result])
    return out.reshape(*x.shape[:-1], tiles, TILE)


def weight(w: PackedWeight, dtype, plan: Plan) -> jax.Array:
    """Carries out a plan of form weight: the transpose of the weight, of shape (tiles, 16, k)."""
    shape = (w.values.shape[0], TILE, w.format.k)
    if plan.choice.implementation == selection.XLA:
        return dequantized(w, dtype).T.reshape(shape)
    return call(plan.problem, plan.choice, _operands(w), [jax.ShapeDtypeStruct(shape, dtype)])[0]


def _operands(w: PackedWeight) -> list[jax.Array]:
    operands = [w.values, w.scales]
    if w.zero_points is not None:
        operands.append(w.zero_points)
    if w.format.table is not None:
        operands.append(jnp.asarray(np.array(w.format.table, np.float32)))
    return operands
