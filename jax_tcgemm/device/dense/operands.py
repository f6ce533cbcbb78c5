"""Operands of a dense product in the dtype and order that the call reads."""

import jax
from jax import lax

from jax_tcgemm.device import split_precision
from jax_tcgemm.device.dense.folding import Fold
from jax_tcgemm.device.dense.product import Product, split_of
from jax_tcgemm.problem.precision import Numerics


def prepare(
    x: jax.Array, product: Product, numerics: Numerics, folded: Fold, *, is_rhs: bool = False
) -> jax.Array:
    """An operand of a product in the dtype, or terms of it, and the order that it was folded in."""
    x = in_dtype(x, product, numerics, is_rhs)
    order = folded.rhs_order if is_rhs else folded.lhs_order
    return x if order is None else lax.transpose(x, order)


def in_dtype(x: jax.Array, product: Product, numerics: Numerics, is_rhs: bool) -> jax.Array:
    """Return an operand in the dtype that is multiplied, or its terms."""
    if numerics.terms is None:
        return lax.convert_element_type(x, numerics.rhs_dtype if is_rhs else numerics.lhs_dtype)
    return split_precision.split(x, split_of(product, numerics, is_rhs))
