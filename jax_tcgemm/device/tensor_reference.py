"""The operations in terms of JAX's own: what XLA runs, and what derivatives are taken of."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.device import xla_dot
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.tensor.modes import Modes
from jax_tcgemm.problem.tensor.operation import Operation, dot_dimensions, exchanges_operands
from jax_tcgemm.problem.tensor.operators import BINARY, REDUCTIONS, UNARY, scaled
from jax_tcgemm.sharding import shardings


def contract(
    operation: Operation, operands, precision, result_dtype, platform: str, out_sharding=None
) -> jax.Array:
    """The sum of alpha * opA(A) * opB(B) over the modes that the result lacks, plus beta * C."""
    a, b, *c = operands
    a_modes, b_modes = operation.operands[:2]
    a, b = (UNARY[op](x) for op, x in zip(operation.unary[:2], (a, b), strict=True))
    alpha, beta, _ = operation.scalars
    is_bare = alpha == 1 and not c
    sum_dtype = result_dtype if is_bare else wide_dtype(result_dtype)
    numbers, permutation = dot_dimensions(a_modes, b_modes, operation.result)
    if numbers[0][0] or out_sharding is not None:
        if isinstance(a.size, int) and isinstance(b.size, int) and b.size >= a.size:
            # In the order of the longer operand, which XLA then need not permute; of two as long in
            # that of the second: in a path the first was computed last, and is fused into this.
            (a_axes, b_axes), batch = numbers
            pairs = sorted(zip(b_axes, a_axes, strict=True))
            numbers = (tuple(i for _, i in pairs), tuple(i for i, _ in pairs)), batch
        can_exchange = out_sharding is None and (precision is None or type(precision) is tuple)
        if can_exchange and exchanges_operands(numbers, permutation, a.ndim):
            # As in jax.numpy.einsum, so that the result need not be permuted.
            a, b, numbers = b, a, tuple(pair[::-1] for pair in numbers)
            precision, permutation = precision and precision[::-1], tuple(range(len(permutation)))
        d = xla_dot.dot_general(
            a,
            b,
            numbers,
            platform=platform,
            precision=precision,
            preferred_element_type=sum_dtype,
            out_sharding=shardings.natural(out_sharding, permutation),
        )
        if permutation != tuple(range(d.ndim)):
            d = lax.transpose(d, permutation)
    else:
        a, b = (_aligned(x, m, operation.result) for x, m in ((a, a_modes), (b, b_modes)))
        d = a.astype(sum_dtype) * b.astype(sum_dtype)
    return finish_contraction(d, c[0] if c else None, alpha, beta, result_dtype)


def finish_contraction(d, c, alpha, beta, result_dtype) -> jax.Array:
    """Scales D, adds beta * C, and rounds once."""
    d = scaled(d, alpha)
    if c is not None:
        d = d + scaled(c.astype(d.dtype), beta)
    return d.astype(result_dtype)


def elementwise(operation: Operation, operands) -> jax.Array:
    """Maps and combines up to three operands; a mode that one lacks broadcasts it."""
    dtype = operands[0].dtype
    alpha, beta, gamma = operation.scalars
    scalars = {1: (alpha,), 2: (alpha, gamma), 3: (alpha, beta, gamma)}[len(operands)]
    first, *others = (
        scaled(UNARY[op](_aligned(x, modes, operation.result).astype(wide_dtype(dtype))), scalar)
        for x, modes, op, scalar in zip(
            operands, operation.operands, operation.unary, scalars, strict=True
        )
    )
    for combine, other in zip(operation.combine, others, strict=True):
        first = BINARY[combine](first, other)
    return jnp.broadcast_to(first, operation.shape(operation.result)).astype(dtype)


def reduce(operation: Operation, operands) -> jax.Array:
    """Alpha times the reduction of op(A) over the modes that the result lacks, plus beta * C."""
    a, *c = operands
    modes, dtype = operation.operands[0], a.dtype
    axes = tuple(i for i, mode in enumerate(modes) if mode not in operation.result)
    kept = [mode for mode in modes if mode in operation.result]
    x = UNARY[operation.unary[0]](a.astype(wide_dtype(dtype)))
    x = REDUCTIONS[operation.combine[0]](x, axis=axes)
    x = lax.transpose(x, [kept.index(mode) for mode in operation.result])
    alpha, beta, _ = operation.scalars
    return finish_contraction(x, c[0] if c else None, alpha, beta, dtype)


def _aligned(x, modes: Modes, result: Modes) -> jax.Array:
    """Puts modes in the result's order, with extent 1 where there is none."""
    x = lax.transpose(x, [modes.index(mode) for mode in result if mode in modes])
    return lax.expand_dims(x, [i for i, mode in enumerate(result) if mode not in modes])
