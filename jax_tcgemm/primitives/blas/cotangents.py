"""Cotangents of BLAS calls, made of BLAS calls: each routine says what transposes its F."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device import blas_reference as reference
from jax_tcgemm.primitives.blas.multilinear import (
    add_product,
    add_scaled,
    apply,
    instantiate,
    mapped,
    through_c,
    times,
)
from jax_tcgemm.primitives.blas.primitive import blas_p
from jax_tcgemm.problem.blas.call import Call, band_index
from jax_tcgemm.system.jax_internals import ad

_FLIPPED = {"N": "T", "T": "N"}


def _transpose(cotangents, *operands, call):
    g = instantiate(cotangents)
    given = call.split(operands)

    def is_linear(group):
        return group is not None and any(ad.is_undefined_primal(x) for x in group)

    found = [
        _TRANSPOSES[call.routine][i](call, g, given) if is_linear(group) else (None,) * call.items
        for i, group in enumerate(given.inputs)
    ]
    if call.has_c:
        found.append(_c_cotangent(call, g, given) if is_linear(given.c) else (None,) * call.items)
    if call.scalar_args:
        found.append(_scalar_cotangents(call, g, given))
    flat = [x for group in found for x in group]
    return [
        _like(x, operand.aval) if ad.is_undefined_primal(operand) else None
        for x, operand in zip(flat, operands, strict=True)
    ]


def _conj(group) -> tuple:
    return mapped(lax.conj, group) if jnp.iscomplexobj(group[0]) else tuple(group)


def _conj_scalars(call: Call, scalars):
    call = call.replace(alpha=np.conj(call.alpha), beta=np.conj(call.beta))
    return call, scalars and _conj(scalars)


def _like(x, aval):
    """Summed over the batch dimensions that the operand does not have, in its dtype."""
    if x is None:
        return None
    axes = [
        i for i, (own, extent) in enumerate(zip(aval.shape, x.shape, strict=True)) if own != extent
    ]
    if axes:
        x = reference.wide(x).sum(axes, keepdims=True)
    return lax.convert_element_type(x, aval.dtype)


def _c_cotangent(call, g, given) -> tuple:
    if call.routine not in ("trsv", "trsm"):
        return through_c(call, g, given.scalars)
    if call.op_a != "C":
        return apply(call.replace(op_a=_FLIPPED[call.op_a]), given.inputs, g, given.scalars)
    # The transpose of (A^H)^-1 is conj(A)^-1.
    call, scalars = _conj_scalars(call.replace(op_a="N"), given.scalars)
    return _conj(apply(call, given.inputs, _conj(g), scalars))


def _scalar_cotangents(call, g, given):
    """Sums of what alpha and beta multiply, times the cotangent."""

    def total(of, x):
        axes = tuple(range(of.ndim - call.ranks.c, of.ndim))
        return (reference.wide(of) * reference.wide(x)).sum(axes)

    def of_c():
        return mapped(lambda c, t: add_scaled(call, jnp.zeros_like(t), jnp.ones(()), c), given.c, g)

    alpha, beta = given.scalars
    found = [None, None]
    if ad.is_undefined_primal(alpha):
        one = call.replace(alpha=1.0, beta=0.0)
        if call.routine == "trsm":
            products = apply(one, given.inputs, given.c)
        elif call.routine == "scal":
            products = of_c()
        else:
            products = add_product(one, given.inputs, None, None, g)
        found[0] = sum(mapped(total, products, g))
    if ad.is_undefined_primal(beta) and call.has_c:
        found[1] = sum(mapped(total, of_c(), g))
    return found


def _dot_x(call, g, given):
    """Return the cotangent of x in sum op(x) y: g y, conjugated if x is."""
    x, (y,) = given.inputs[0][0].aval, given.inputs[1]
    values = reference.elements(y, call.n, call.increments[1]) * g[0][..., None]
    values = values.conj() if call.op_a == "C" else values
    return (_scattered(values, x, call.increments[0]),)


def _dot_y(call, g, given):
    (x,), y = given.inputs[0], given.inputs[1][0].aval
    values = reference.elements(x, call.n, call.increments[0])
    values = (values.conj() if call.op_a == "C" else values) * g[0][..., None]
    return (_scattered(values, y, call.increments[1]),)


def _scattered(values, aval, increment):
    """Zeros with `values` in the elements that a vector of this type contributes."""
    zeros = jnp.zeros((*values.shape[:-1], aval.shape[-1]), aval.dtype)
    return reference.set_strided(zeros, values, increment)


def _axpy_x(call, g, given):
    x = given.inputs[0][0].aval
    zeros = jnp.zeros((*g[0].shape[:-1], x.shape[-1]), x.dtype)
    reverse = call.replace(increments=call.increments[::-1])
    return apply(reverse, (g,), (zeros,), given.scalars)


def _gemv_x(call, g, given):
    """op(A)^T g, in the elements of x; gbmv likewise."""
    (a,), x = given.inputs[0], given.inputs[1][0].aval
    rows, columns = _matrix_shape(call, a)
    length = columns if call.op_a == "N" else rows
    reverse = call.replace(increments=call.increments[::-1], beta=0.0, n=length)
    c = None
    if reverse.increments[1] > 1 or x.shape[-1] != length:
        c = (jnp.zeros((*g[0].shape[:-1], x.shape[-1]), x.dtype),)
    if call.op_a == "C":  # conj(A) g
        reverse, scalars = _conj_scalars(reverse.replace(op_a="N"), given.scalars)
        return _conj(apply(reverse, ((a,), _conj(g)), c, _without_beta(scalars)))
    reverse = reverse.replace(op_a=_FLIPPED[call.op_a])
    return apply(reverse, ((a,), g), c, _without_beta(given.scalars))


def _without_beta(scalars):
    return scalars and (scalars[0], jnp.zeros_like(scalars[1]))


def _matrix_shape(call, a):
    return (a.shape[-2], call.columns) if call.routine == "gbmv" else a.shape[-2:]


def _vectors_of_outer(call, g, given):
    """The vectors whose outer product, rows by columns of A, is the cotangent of op(A)'s A."""
    a, (x,) = given.inputs[0][0].aval, given.inputs[1]
    rows, columns = _matrix_shape(call, a)
    g_length, x_length = (rows, columns) if call.op_a == "N" else (columns, rows)
    g_vector = reference.elements(g[0], g_length, call.increments[1])
    x_vector = reference.elements(x, x_length, call.increments[0])
    alpha = call.alpha if given.scalars is None else given.scalars[0]
    g_vector = times(call, alpha, g_vector)
    pair = (g_vector, x_vector) if call.op_a == "N" else (x_vector, g_vector)
    return _conj(pair) if call.op_a == "C" else pair


def _gemv_a(call, g, given):
    """The outer product; summed over the batch, a product of matrices, where all share A."""
    a = given.inputs[0][0].aval
    left, right = _vectors_of_outer(call, g, given)
    batch = jnp.broadcast_shapes(left.shape[:-1], right.shape[:-1])
    left, right = (jnp.broadcast_to(v, (*batch, v.shape[-1])) for v in (left, right))
    if np.prod(a.shape[:-2], dtype=int) == 1:
        ones = (1,) * len(batch)
        left, right = (v.reshape(*ones, math.prod(batch), v.shape[-1]) for v in (left, right))
    else:
        left, right = left[..., None, :], right[..., None, :]
    outer = Call(
        call.op, "gemm", op_a="T", options=call.options, implementation=call.implementation
    )
    return apply(outer, ((left,), (right,)))


def _gbmv_a(call, g, given):
    """Return the cotangent of a band matrix in band storage, 0 outside the matrix."""
    a = given.inputs[0][0].aval
    if call.columns == 0:
        return (jnp.zeros(a.shape, a.dtype),)
    left, right = _vectors_of_outer(call, g, given)
    column, exists = band_index(a.shape[-2], call.columns, call.kl, call.ku)
    return (jnp.where(exists, left[..., None] * right[..., column], 0),)


def _gemm_factor(call, g, given, is_b):
    """The cotangent of A or B: alpha g op(B)^T or alpha op(A)^T g, in the order of A or B."""
    others, op = (given.inputs[0], call.op_a) if is_b else (given.inputs[1], call.op_b)
    own = call.op_b if is_b else call.op_a
    if op == "C":
        others, op = _conj(others), "T"
    factors = [(g, "N"), (others, _FLIPPED[op])] if own == "N" else [(others, op), (g, "T")]
    if is_b:
        factors.reverse()
    (left, left_op), (right, right_op) = factors
    product = call.replace(op_a=left_op, op_b=right_op, beta=0.0)
    found = apply(product, (left, right), None, _without_beta(given.scalars))
    return _conj(found) if own == "C" else found


def _gemm_a(call, g, given):
    return _gemm_factor(call, g, given, is_b=False)


def _gemm_b(call, g, given):
    return _gemm_factor(call, g, given, is_b=True)


# For each input, the rule of its cotangent; of those not here, out is not linear in it.
_TRANSPOSES = {
    "dot": (_dot_x, _dot_y),
    "axpy": (_axpy_x,),
    "gemv": (_gemv_a, _gemv_x),
    "gbmv": (_gbmv_a, _gemv_x),
    "gemm": (_gemm_a, _gemm_b),
}

ad.primitive_transposes[blas_p] = _transpose
