"""Calls of dense products: a plan is carried out by a kernel or by XLA."""

import jax
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device import split_precision
from jax_tcgemm.device.call import call
from jax_tcgemm.device.dense.of_xla import product_of_xla
from jax_tcgemm.device.dense.operands import prepare
from jax_tcgemm.device.dense.plan import Plan
from jax_tcgemm.device.dense.product import layout_of
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem


def dot_general(lhs: jax.Array, rhs: jax.Array, plan: Plan, out_sharding=None) -> jax.Array:
    """Carries out a plan. `out_sharding` is that of the `LaxProduct`, for XLA's dot."""
    if plan.runs_by_xla:
        return product_of_xla(lhs, rhs, plan, out_sharding)
    numerics, folded = plan.numerics, plan.fold
    lhs = prepare(lhs, plan.product, numerics, folded)
    rhs = prepare(rhs, plan.product, numerics, folded, is_rhs=True)
    a, b = (rhs, lhs) if folded.swapped else (lhs, rhs)
    d = local_gemm(plan.problem, a, b, choice=plan.choice, shape=folded.shape)
    if folded.result_order is not None:
        d = lax.transpose(d, folded.result_order)
    d = split_precision.with_components(
        d, layout_of(plan.product, numerics).component, plan.product.result_shape
    )
    return lax.convert_element_type(d, plan.product.result_dtype)


def local_gemm(
    problem: Problem,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None = None,
    *,
    in_place: bool = True,
    choice: selection.Choice,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """The custom call: D = alpha * op(A) op(B) + beta * C on flat row-major buffers.

    Args:
      problem: extents, strides, layouts and dtypes, without an epilogue; the arrays must have its
        dtypes.
      a: buffer of A, of any shape with the elements that the problem addresses.
      b: buffer of B, likewise.
      c: buffer of C, packed like D; needed unless `problem.beta` is 0, and then never read.
      in_place: whether D takes the place in memory of C: without a copy where that is not needed
        afterwards and, if it is the caller's, donated; XLA copies it first elsewhere.
      choice: what runs it; not "xla".
      shape: shape of D; the same elements as `problem.d_shape`, which is the default. A reshape
        after the call would keep XLA from letting another call's D take its place.

    Returns:
      D, of dtype `problem.out_dtype`, packed.

    Raises:
      ValueError: when C is missing.
    """
    if c is None and problem.beta != 0:
        raise ValueError(
            f"local_gemm: c must be given for beta={problem.beta}, got c=None; pass what beta is of"
        )
    shape = problem.d_shape if shape is None else shape
    result = jax.ShapeDtypeStruct(shape, DTYPES[problem.out_dtype])
    operands = [a, b] if c is None else [a, b, lax.reshape(c, shape)]
    aliases = {2: 0} if in_place and c is not None else None
    return call(problem, choice, operands, [result], aliases)[0]
