"""Dense products that XLA computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device import split_precision, xla_dot
from jax_tcgemm.device.dense.operands import in_dtype
from jax_tcgemm.device.dense.plan import Plan
from jax_tcgemm.device.dense.product import Product, layout_of
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import for_xla
from jax_tcgemm.problem.tensor.operation import exchanges_operands
from jax_tcgemm.selection import xla_forms


@dataclasses.dataclass(frozen=True)
class LaxProduct:
    """How XLA is asked for a product: as the transpose of a `lax.dot_general`.

    Attributes:
      exchanged: whether the right operand comes first.
      dimension_numbers: as of `lax.dot_general`.
      permutation: order of the result's dimensions.
      precision: as of `lax.dot_general`.
    """

    exchanged: bool
    dimension_numbers: tuple
    permutation: tuple[int, ...]
    precision: object

    @classmethod
    def of(cls, product: Product) -> "LaxProduct":
        """With the operands exchanged where the result then comes out in its order."""
        precision, permutation = for_xla(product.precision), product.permutation
        numbers, lhs_ndim = product.dimension_numbers, len(product.lhs_shape)
        # A DotAlgorithm is a tuple, too.
        can_exchange = precision is None or type(precision) is tuple
        if can_exchange and exchanges_operands(numbers, permutation, lhs_ndim):
            numbers = tuple(pair[::-1] for pair in numbers)
            identity = tuple(range(len(permutation)))
            return cls(True, numbers, identity, precision and precision[::-1])
        return cls(False, product.dimension_numbers, permutation, precision)


def product_of_xla(lhs, rhs, plan, out_sharding):
    """Compute a product in the form of XLA that its plan names."""
    product, dtype = plan.product, plan.product.result_dtype
    if plan.has_terms:
        return _xla_of_terms(lhs, rhs, plan)
    match plan.choice.config:
        case xla_forms.BROADCAST:
            return _broadcast(lhs, rhs, plan)
        case xla_forms.BFLOAT16:
            lhs, rhs, dtype = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), np.float32
        case xla_forms.INT32:
            lhs, rhs, dtype = lhs.astype(np.int32), rhs.astype(np.int32), np.int32
    asked = LaxProduct.of(product)
    precision = asked.precision
    is_preset = isinstance(precision, lax.DotAlgorithmPreset)
    if plan.platform == "cpu" and is_preset and plan.numerics is not None:
        # XLA:CPU refuses some presets. Converting as they say and multiplying in full precision
        # is at least as accurate, and lets a program written for the GPU run.
        lhs = lax.convert_element_type(lhs, plan.numerics.lhs_dtype)
        rhs = lax.convert_element_type(rhs, plan.numerics.rhs_dtype)
        precision, dtype = lax.Precision.HIGHEST, plan.numerics.out_dtype
    out = xla_dot.dot_general(
        *((rhs, lhs) if asked.exchanged else (lhs, rhs)),
        asked.dimension_numbers,
        platform=plan.platform,
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    if asked.permutation != tuple(range(out.ndim)):
        out = lax.transpose(out, asked.permutation)
    return lax.convert_element_type(out, product.result_dtype)


def _broadcast(lhs: jax.Array, rhs: jax.Array, plan: Plan) -> jax.Array:
    """The product as a sum over k of broadcast products."""
    product = plan.product
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = product.dimension_numbers
    dtype = wide_dtype(product.result_dtype)

    def last(x, contract, batch):
        """An operand of shape (*batch, *free, k), and its free extents."""
        free = [axis for axis in range(x.ndim) if axis not in (*contract, *batch)]
        shape = tuple(x.shape[axis] for axis in (*batch, *free))
        x = lax.transpose(x, (*batch, *free, *contract)).astype(dtype)
        return lax.reshape(x, (*shape, plan.problem.k)), shape[len(batch) :]

    lhs, rows = last(lhs, lhs_contract, lhs_batch)
    rhs, columns = last(rhs, rhs_contract, rhs_batch)
    num_batch, ndim = len(lhs_batch), len(product.result_shape)
    of_rows = tuple(range(num_batch + len(rows)))
    of_columns = (*range(num_batch), *range(num_batch + len(rows), ndim))
    shape = (*lhs.shape[:-1], *columns)

    def over(x, axes, *k):
        return lax.broadcast_in_dim(x, (*shape, *(x.shape[-1:] if k else ())), (*axes, *k))

    if xla_forms.is_reduction(plan.problem):
        out = jnp.sum(over(lhs, of_rows, ndim) * over(rhs, of_columns, ndim), -1, dtype=dtype)
    else:
        terms = (
            over(lhs[..., i], of_rows) * over(rhs[..., i], of_columns)
            for i in range(plan.problem.k)
        )
        out = functools.reduce(lax.add, terms)
    return lax.transpose(out, product.permutation).astype(product.result_dtype)


def _xla_of_terms(lhs, rhs, plan) -> jax.Array:
    """XLA's own product of the terms, in whichever order of its dimensions."""
    product, numerics = plan.product, plan.numerics
    layout, dtype = layout_of(product, numerics), numerics.out_dtype
    lhs = in_dtype(lhs, product, numerics, is_rhs=False)
    rhs = in_dtype(rhs, product, numerics, is_rhs=True)
    if plan.platform == "cpu":  # Where XLA has no products of batches of bfloat16 in float32.
        dtype = np.dtype(jnp.float32)
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    out = lax.dot_general(
        lhs,
        rhs,
        layout.dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=dtype,
    )
    out = split_precision.with_components(
        lax.transpose(out, layout.permutation), layout.component, product.result_shape
    )
    return lax.convert_element_type(out, product.result_dtype)
