"""Linear structure of BLAS calls, term by term: out = alpha F(inputs) + beta c.

Elements of c between the increments pass through. Tangents and cotangents are made of these.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.device import blas_reference as reference
from jax_tcgemm.primitives.blas.primitive import bind
from jax_tcgemm.problem.blas.call import Call, Operands, scale_dtype
from jax_tcgemm.system.jax_internals import ad


def apply(call: Call, inputs, c=None, scalars=None) -> tuple:
    """The results of a call on groups of operands."""
    call = call.replace(has_c=c is not None, scalar_args=scalars is not None)
    return tuple(bind(call, *Operands(tuple(inputs), c, scalars).flat()))


def mapped(f, *groups) -> tuple:
    """F of each item's arrays."""
    return tuple(f(*arrays) for arrays in zip(*groups, strict=True))


def instantiate(group) -> tuple:
    """A group of tangents or cotangents with zeros that are arrays."""
    return mapped(ad.instantiate_zeros, group)


def _is_vector(call: Call) -> bool:
    return call.ranks.c == 1


def times(call: Call, scalar, x):
    """The product in x's dtype; an array scalar has batch dimensions only."""
    if not isinstance(scalar, jax.Array):
        return (reference.static(scalar, scale_dtype(x.dtype)) * reference.wide(x)).astype(x.dtype)
    scalar = jnp.expand_dims(scalar, tuple(range(scalar.ndim, scalar.ndim + call.ranks.c)))
    return (scalar * reference.wide(x)).astype(x.dtype)


def through_c(call, c, scalars) -> tuple:
    """Return the term of c alone: beta c where the call updates c, and c elsewhere."""
    if call.routine in ("scal", "swap"):
        return apply(call, (), c, scalars)
    if call.routine == "axpy":
        return c
    beta = call.beta if scalars is None else scalars[1]
    if call.routine == "gemm":
        return mapped(lambda x: times(call, beta, x), c)
    scaled = mapped(lambda x: reference.elements(x, call.n, call.increment_c), c)
    return mapped(
        lambda x, s: reference.set_strided(x, times(call, beta, s), call.increment_c), c, scaled
    )


def add_product(call, inputs, scalars, total, out) -> tuple:
    """The sum alpha F(inputs) + total, zero where the call passes c on."""
    if call.ranks.c is None:
        product = apply(call, inputs)
        return product if total is None else mapped(lax.add, total, product)
    passes = _is_vector(call) and (call.increment_c > 1 or out[0].shape[-1] != call.n)
    c = total
    if c is None and (passes or call.routine == "axpy"):
        c = mapped(jnp.zeros_like, out)
    beta = 0.0 if total is None else 1.0
    if scalars is not None:
        scalars = (scalars[0], jnp.full_like(scalars[1], beta))
    return apply(call.replace(beta=beta), inputs, c, scalars)


def add_scaled(call, total, scalar, c):
    """`total` plus scalar * c where the call updates c."""
    if not _is_vector(call):
        return total + times(call, scalar, c)
    old = reference.elements(total, call.n, call.increment_c)
    term = times(call, scalar, reference.elements(c, call.n, call.increment_c))
    return reference.set_strided(total, old + term, call.increment_c)
