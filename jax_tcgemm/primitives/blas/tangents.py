"""Tangents of BLAS calls, made of BLAS calls.

Most routines are multilinear, so that the tangent is the call itself with one operand replaced at a
time, accumulated in place. A solve also follows its matrix, asum and nrm2 their only vector; an
index has no derivative.
"""

import jax.numpy as jnp
from jax import lax

from jax_tcgemm.primitives.blas.multilinear import (
    add_product,
    add_scaled,
    apply,
    instantiate,
    mapped,
    through_c,
    times,
)
from jax_tcgemm.primitives.blas.primitive import bind, blas_p
from jax_tcgemm.problem.blas.call import Call
from jax_tcgemm.system.jax_internals import ad, zero_tangent


def _jvp(primals, tangents, *, call):
    out = bind(call, *primals)
    rule = _TANGENTS.get(call.routine, _multilinear_tangent)
    tangent = rule(call, call.split(primals), call.split(tangents), out)
    if tangent is None:
        tangent = [zero_tangent(x) for x in out]
    return out, list(tangent)


def _is_zero(group) -> bool:
    return all(type(x) is ad.Zero for x in group)


def _multilinear_tangent(call, primal, tangent, out):
    """One term for each operand that has a tangent."""
    total = None
    if tangent.c is not None and not _is_zero(tangent.c):
        total = through_c(call, instantiate(tangent.c), primal.scalars)
    for i, group in enumerate(tangent.inputs):
        if not _is_zero(group):
            inputs = [*primal.inputs[:i], instantiate(group), *primal.inputs[i + 1 :]]
            total = add_product(call, inputs, primal.scalars, total, out)
    if tangent.scalars is not None:
        for scalar, of_product in zip(tangent.scalars, (True, False), strict=True):
            if type(scalar) is ad.Zero:
                continue
            if of_product and call.ranks.inputs:
                scalars = (scalar, jnp.zeros_like(scalar))
                total = add_product(call, primal.inputs, scalars, total, out)
            elif of_product or call.has_c:
                total = total or mapped(jnp.zeros_like, out)
                total = mapped(lambda t, c, s=scalar: add_scaled(call, t, s, c), total, primal.c)
    # c may lack dimensions of the batch.
    return total and mapped(lambda t, like: jnp.broadcast_to(t, like.shape), total, out)


def _swap_tangent(call, primal, tangent, out):
    return None if _is_zero(tangent.c) else apply(call, (), instantiate(tangent.c))


def _no_tangent(call, primal, tangent, out):
    return None


def _asum_tangent(call, primal, tangent, out):
    """Sum of sign(re) dre + sign(im) dim."""
    ((x,),), ((dx,),) = primal.inputs, tangent.inputs
    if type(dx) is ad.Zero:
        return None
    if not jnp.iscomplexobj(x):
        return _inner(call, jnp.sign(x), dx)
    (re,) = _inner(call, jnp.sign(x.real), dx.real)
    (im,) = _inner(call, jnp.sign(x.imag), dx.imag)
    return (re + im,)


def _nrm2_tangent(call, primal, tangent, out):
    """re(x^H dx) / |x|; a zero vector has no derivative, and gives NaN."""
    ((x,),), ((dx,),) = primal.inputs, tangent.inputs
    if type(dx) is ad.Zero:
        return None
    (product,) = _inner(call, x, dx, op_a="C")
    return (product.real / out[0],)


def _inner(call, x, y, op_a="N") -> tuple:
    increment = call.increments[0]
    dot = call.replace(routine="dot", increments=(increment, increment), op_a=op_a)
    return apply(dot, ((x,), (y,)))


def _triangle_of(call, a):
    """The part of a matrix that a solve reads."""
    offset = int(call.unit)
    return jnp.triu(a, offset) if call.upper else jnp.tril(a, -offset)


def _solve_tangent(call, primal, tangent, out):
    """Solves for the tangents of both sides: op(A) dX = alpha dB - op(dA) X."""
    (da,), (db,) = tangent.inputs[0], tangent.c
    db = None if type(db) is ad.Zero else db
    alpha, beta = primal.scalars or (None, None)
    if tangent.scalars is not None and type(tangent.scalars[0]) is not ad.Zero:
        scaled = apply(call, primal.inputs, primal.c, (tangent.scalars[0], beta))
    else:
        scaled = None
    if type(da) is ad.Zero:
        solved = None if db is None else apply(call, primal.inputs, (db,), primal.scalars)
    else:
        da, (x,) = _triangle_of(call, da), out
        plain = Call(call.op, "gemm", options=call.options, implementation=call.implementation)
        if call.routine == "trsv":
            product = plain.replace(
                routine="gemv", n=call.n, op_a=call.op_a, increments=(call.increments[0],) * 2
            )
            c = jnp.zeros_like(x) if db is None else db
            rhs = apply(product.replace(alpha=-1.0, beta=1.0), ((da,), (x,)), (c,))
        else:
            factors = ((x,), (da,)) if call.right else ((da,), (x,))
            ops = {"op_b" if call.right else "op_a": call.op_a}
            scaled_db = (
                None if db is None else (times(call, call.alpha if alpha is None else alpha, db),)
            )
            beta_ = 0.0 if db is None else 1.0
            rhs = apply(plain.replace(alpha=-1.0, beta=beta_, **ops), factors, scaled_db)
        solved = apply(call.replace(alpha=1.0), primal.inputs, rhs)
    if scaled is None or solved is None:
        return scaled or solved
    return mapped(lax.add, scaled, solved)


_TANGENTS = {
    "iamax": _no_tangent,
    "iamin": _no_tangent,
    "asum": _asum_tangent,
    "nrm2": _nrm2_tangent,
    "swap": _swap_tangent,
    "trsv": _solve_tangent,
    "trsm": _solve_tangent,
}


ad.primitive_jvps[blas_p] = _jvp
