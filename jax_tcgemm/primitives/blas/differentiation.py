"""Derivatives of BLAS calls, made of BLAS calls.

Most routines are multilinear: out = alpha F(a, b) + beta c, where elements of c between the
increments pass through. The tangent is then the call itself with one operand replaced at a time,
accumulated in place, and each routine only says what transposes F. A solve also follows its
matrix, asum and nrm2 their only vector; an index has no derivative.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jax_tcgemm.primitives.blas import xla
from jax_tcgemm.primitives.blas.call import Call, Operands, scale_dtype
from jax_tcgemm.primitives.blas.primitive import bind, blas_p

_FLIPPED = {"N": "T", "T": "N"}


def _apply(call: Call, inputs, c=None, scalars=None) -> tuple:
    """The results of a call on groups of operands."""
    call = call.replace(has_c=c is not None, scalar_args=scalars is not None)
    return tuple(bind(call, *Operands(tuple(inputs), c, scalars).flat()))


def _map(f, *groups) -> tuple:
    return tuple(f(*arrays) for arrays in zip(*groups, strict=True))


def _conj(group) -> tuple:
    return _map(lax.conj, group) if jnp.iscomplexobj(group[0]) else tuple(group)


def _conj_scalars(call: Call, scalars):
    call = call.replace(alpha=np.conj(call.alpha), beta=np.conj(call.beta))
    return call, scalars and _conj(scalars)


def _is_zero(group) -> bool:
    return all(type(x) is ad.Zero for x in group)


def _instantiate(group) -> tuple:
    return _map(ad.instantiate_zeros, group)


def _is_vector(call: Call) -> bool:
    return call.ranks.c == 1


def _times(call: Call, scalar, x):
    """The product in x's dtype; an array scalar has batch dimensions only."""
    if not isinstance(scalar, jax.Array):
        return (xla.static(scalar, scale_dtype(x.dtype)) * xla.wide(x)).astype(x.dtype)
    scalar = jnp.expand_dims(scalar, tuple(range(scalar.ndim, scalar.ndim + call.ranks.c)))
    return (scalar * xla.wide(x)).astype(x.dtype)


# --- tangents -----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call):
    out = bind(call, *primals)
    rule = _TANGENTS.get(call.routine, _multilinear_tangent)
    tangent = rule(call, call.split(primals), call.split(tangents), out)
    if tangent is None:
        tangent = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    return out, list(tangent)


def _multilinear_tangent(call, primal, tangent, out):
    """One term for each operand that has a tangent."""
    total = None
    if tangent.c is not None and not _is_zero(tangent.c):
        total = _through_c(call, _instantiate(tangent.c), primal.scalars)
    for i, group in enumerate(tangent.inputs):
        if not _is_zero(group):
            inputs = [*primal.inputs[:i], _instantiate(group), *primal.inputs[i + 1 :]]
            total = _add_product(call, inputs, primal.scalars, total, out)
    if tangent.scalars is not None:
        for scalar, of_product in zip(tangent.scalars, (True, False), strict=True):
            if type(scalar) is ad.Zero:
                continue
            if of_product and call.ranks.inputs:
                scalars = (scalar, jnp.zeros_like(scalar))
                total = _add_product(call, primal.inputs, scalars, total, out)
            elif of_product or call.has_c:
                total = total or _map(jnp.zeros_like, out)
                total = _map(lambda t, c, s=scalar: _add_scaled(call, t, s, c), total, primal.c)
    return total


def _through_c(call, c, scalars) -> tuple:
    """What the call makes of c alone: beta c where it updates c, and c elsewhere."""
    if call.routine in ("scal", "swap"):
        return _apply(call, (), c, scalars)
    if call.routine == "axpy":
        return c
    beta = call.beta if scalars is None else scalars[1]
    if call.routine == "gemm":
        return _map(lambda x: _times(call, beta, x), c)
    scaled = _map(lambda x: xla.elements(x, call.n, call.increment_c), c)
    return _map(lambda x, s: xla.place(x, _times(call, beta, s), call.increment_c), c, scaled)


def _add_product(call, inputs, scalars, total, out) -> tuple:
    """The sum alpha F(inputs) + total, zero where the call passes c on."""
    if call.ranks.c is None:
        product = _apply(call, inputs)
        return product if total is None else _map(lax.add, total, product)
    passes = _is_vector(call) and (call.increment_c > 1 or out[0].shape[-1] != call.n)
    c = total
    if c is None and (passes or call.routine == "axpy"):
        c = _map(jnp.zeros_like, out)
    beta = 0.0 if total is None else 1.0
    if scalars is not None:
        scalars = (scalars[0], jnp.full_like(scalars[1], beta))
    return _apply(call.replace(beta=beta), inputs, c, scalars)


def _add_scaled(call, total, scalar, c):
    """`total` plus scalar * c where the call updates c."""
    if not _is_vector(call):
        return total + _times(call, scalar, c)
    old = xla.elements(total, call.n, call.increment_c)
    term = _times(call, scalar, xla.elements(c, call.n, call.increment_c))
    return xla.place(total, old + term, call.increment_c)


def _swap_tangent(call, primal, tangent, out):
    return None if _is_zero(tangent.c) else _apply(call, (), _instantiate(tangent.c))


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
    return _apply(dot, ((x,), (y,)))


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
        scaled = _apply(call, primal.inputs, primal.c, (tangent.scalars[0], beta))
    else:
        scaled = None
    if type(da) is ad.Zero:
        solved = None if db is None else _apply(call, primal.inputs, (db,), primal.scalars)
    else:
        da, (x,) = _triangle_of(call, da), out
        plain = Call(call.op, "gemm", options=call.options, implementation=call.implementation)
        if call.routine == "trsv":
            product = plain.replace(
                routine="gemv", n=call.n, op_a=call.op_a, increments=(call.increments[0],) * 2
            )
            c = jnp.zeros_like(x) if db is None else db
            rhs = _apply(product.replace(alpha=-1.0, beta=1.0), ((da,), (x,)), (c,))
        else:
            factors = ((x,), (da,)) if call.right else ((da,), (x,))
            ops = {"op_b" if call.right else "op_a": call.op_a}
            scaled_db = (
                None if db is None else (_times(call, call.alpha if alpha is None else alpha, db),)
            )
            beta_ = 0.0 if db is None else 1.0
            rhs = _apply(plain.replace(alpha=-1.0, beta=beta_, **ops), factors, scaled_db)
        solved = _apply(call.replace(alpha=1.0), primal.inputs, rhs)
    if scaled is None or solved is None:
        return scaled or solved
    return _map(lax.add, scaled, solved)


_TANGENTS = {
    "iamax": _no_tangent,
    "iamin": _no_tangent,
    "asum": _asum_tangent,
    "nrm2": _nrm2_tangent,
    "swap": _swap_tangent,
    "trsv": _solve_tangent,
    "trsm": _solve_tangent,
}


# --- cotangents ---------------------------------------------------------------------------------


def _transpose(cotangents, *operands, call):
    g = _instantiate(cotangents)
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


def _like(x, aval):
    """Summed over the batch dimensions that the operand does not have, in its dtype."""
    if x is None:
        return None
    axes = [
        i for i, (own, extent) in enumerate(zip(aval.shape, x.shape, strict=True)) if own != extent
    ]
    if axes:
        x = xla.wide(x).sum(axes, keepdims=True)
    return lax.convert_element_type(x, aval.dtype)


def _c_cotangent(call, g, given) -> tuple:
    if call.routine not in ("trsv", "trsm"):
        return _through_c(call, g, given.scalars)
    if call.op_a != "C":
        return _apply(call.replace(op_a=_FLIPPED[call.op_a]), given.inputs, g, given.scalars)
    # The transpose of (A^H)^-1 is conj(A)^-1.
    call, scalars = _conj_scalars(call.replace(op_a="N"), given.scalars)
    return _conj(_apply(call, given.inputs, _conj(g), scalars))


def _scalar_cotangents(call, g, given):
    """Sums of what alpha and beta multiply, times the cotangent."""

    def total(of, x):
        axes = tuple(range(of.ndim - call.ranks.c, of.ndim))
        return (xla.wide(of) * xla.wide(x)).sum(axes)

    alpha, beta = given.scalars
    found = [None, None]
    if ad.is_undefined_primal(alpha):
        one = call.replace(alpha=1.0, beta=0.0)
        if call.routine == "trsm":
            products = _apply(one, given.inputs, given.c)
        elif call.routine == "scal":
            products = _map(
                lambda c, t: _add_scaled(call, jnp.zeros_like(t), jnp.ones(()), c), given.c, g
            )
        else:
            products = _add_product(one, given.inputs, None, None, g)
        found[0] = sum(_map(total, products, g))
    if ad.is_undefined_primal(beta) and call.has_c:
        parts = _map(lambda c, t: _add_scaled(call, jnp.zeros_like(t), jnp.ones(()), c), given.c, g)
        found[1] = sum(_map(total, parts, g))
    return found


def _dot_x(call, g, given):
    """Of sum op(x) y: the cotangent of x is g y, conjugated where x is."""
    x, (y,) = given.inputs[0][0].aval, given.inputs[1]
    values = xla.elements(y, call.n, call.increments[1]) * g[0][..., None]
    values = values.conj() if call.op_a == "C" else values
    return (_scattered(values, x, call.increments[0]),)


def _dot_y(call, g, given):
    (x,), y = given.inputs[0], given.inputs[1][0].aval
    values = xla.elements(x, call.n, call.increments[0])
    values = (values.conj() if call.op_a == "C" else values) * g[0][..., None]
    return (_scattered(values, y, call.increments[1]),)


def _scattered(values, aval, increment):
    """Zeros with `values` in the elements that a vector of this type contributes."""
    zeros = jnp.zeros((*values.shape[:-1], aval.shape[-1]), aval.dtype)
    return xla.place(zeros, values, increment)


def _axpy_x(call, g, given):
    x = given.inputs[0][0].aval
    zeros = jnp.zeros((*g[0].shape[:-1], x.shape[-1]), x.dtype)
    reverse = call.replace(increments=call.increments[::-1])
    return _apply(reverse, (g,), (zeros,), given.scalars)


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
        return _conj(_apply(reverse, ((a,), _conj(g)), c, _without_beta(scalars)))
    reverse = reverse.replace(op_a=_FLIPPED[call.op_a])
    return _apply(reverse, ((a,), g), c, _without_beta(given.scalars))


def _without_beta(scalars):
    return scalars and (scalars[0], jnp.zeros_like(scalars[1]))


def _matrix_shape(call, a):
    return (a.shape[-2], call.columns) if call.routine == "gbmv" else a.shape[-2:]


def _vectors_of_outer(call, g, given):
    """The vectors whose outer product, rows by columns of A, is the cotangent of op(A)'s A."""
    a, (x,) = given.inputs[0][0].aval, given.inputs[1]
    rows, columns = _matrix_shape(call, a)
    g_length, x_length = (rows, columns) if call.op_a == "N" else (columns, rows)
    g_vector = xla.elements(g[0], g_length, call.increments[1])
    x_vector = xla.elements(x, x_length, call.increments[0])
    alpha = call.alpha if given.scalars is None else given.scalars[0]
    g_vector = _times(call, alpha, g_vector)
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
        left, right = (v.reshape(*ones, -1, v.shape[-1]) for v in (left, right))
    else:
        left, right = left[..., None, :], right[..., None, :]
    outer = Call(
        call.op, "gemm", op_a="T", options=call.options, implementation=call.implementation
    )
    return _apply(outer, ((left,), (right,)))


def _gbmv_a(call, g, given):
    """The same in the band's storage, and 0 where that lies outside the matrix."""
    a = given.inputs[0][0].aval
    if call.columns == 0:
        return (jnp.zeros(a.shape, a.dtype),)
    left, right = _vectors_of_outer(call, g, given)
    column, exists = xla.band_index(a.shape[-2], call.columns, call.kl, call.ku)
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
    found = _apply(product, (left, right), None, _without_beta(given.scalars))
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

ad.primitive_jvps[blas_p] = _jvp
ad.primitive_transposes[blas_p] = _transpose
