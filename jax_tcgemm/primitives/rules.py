"""Rules that primitives share, whole or in part."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.system.jax_internals import ad, converted, strong_type, varying_axes


def same_varying(*operands, over=()):
    """Inside shard_map, makes all operands vary over the union of their manual axes, and `over`."""
    varying = [varying_axes(x) for x in operands]
    union = frozenset(over).union(*varying)
    return [
        lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def of_derivative(params: dict) -> dict:
    """Return the parameters of a primitive's derivative, which does not inherit the config."""
    options: CallOptions = params["options"]
    return params | {"options": options.without_config()}


def moved(x: jax.Array, dim: int | None, new: int, size: int) -> jax.Array:
    """`x` with its mapped dimension at `new`, repeated where it has none."""
    if dim is None:
        shape = (*x.shape[:new], size, *x.shape[new:])
        return lax.broadcast_in_dim(x, shape, [i + (i >= new) for i in range(x.ndim)])
    return jnp.moveaxis(x, dim, new)


def as_cotangent(x_bar: jax.Array, aval) -> jax.Array:
    """A cotangent in the dtype of its primal, and as weak as that where it is converted."""
    if x_bar.dtype == aval.dtype:
        return x_bar
    if jnp.iscomplexobj(x_bar) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        x_bar = lax.real(x_bar)
    return converted(x_bar, aval.dtype, weak_type=aval.weak_type)


def is_moving(tangent) -> bool:
    """Whether a tangent is one of numbers and not known to be zero."""
    return type(tangent) is not ad.Zero and jnp.result_type(tangent) != jax.dtypes.float0


def jvp_of_moving(f, primals, tangents):
    """`jax.jvp` of a function of arrays, some of whose tangents are `ad.Zero`."""
    moving = [type(t) is not ad.Zero for t in tangents]

    def of_moving(*xs):
        rest = iter(xs)
        return f(*(next(rest) if m else x for m, x in zip(moving, primals, strict=True)))

    pairs = [(x, t) for m, x, t in zip(moving, primals, tangents, strict=True) if m]
    return jax.jvp(of_moving, *map(tuple, zip(*pairs, strict=True)))


def bilinear_series(primitive, primals, series, **params):
    """The Taylor series of a primitive that is linear in its first two operands."""
    (x, y, *constants), (x_terms, y_terms, *_) = primals, series
    xs, ys = [x, *x_terms], [y, *y_terms]
    terms = [
        functools.reduce(
            lax.add,
            [primitive.bind(xs[j], ys[i - j], *constants, **params) for j in range(i + 1)],
        )
        for i in range(len(xs))
    ]
    return terms[0], terms[1:]


def series_by_tracing(f, primals, series, **params):
    """The Taylor series of a function, f, of arrays and parameters; none by integers."""
    from jax.experimental import jet

    moving = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, np.inexact)]

    def of_moving(*values):
        operands = [*primals]
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return f(*operands, **params)

    own = [primals[i] for i in moving], [series[i] for i in moving]
    return jet.jet(of_moving, *own, factorial_scaled=False)


def transpose_by_tracing(f, cotangents, operands, **params):
    """The transpose of a function, f, of arrays and parameters, in the unknown operands."""
    undefined = [ad.is_undefined_primal(x) for x in operands]

    def linear(*moving):
        rest = iter(moving)
        known = zip(undefined, operands, strict=True)
        return f(*(next(rest) if u else x for u, x in known), **params)

    avals = [x.aval for x, u in zip(operands, undefined, strict=True) if u]
    instantiated = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = iter(jax.linear_transpose(linear, *avals)(instantiated))
    return [next(found) if u else None for u in undefined]


def type_of(function: Callable) -> Callable:
    """An abstract evaluation rule that says what `function` of such operands would return.

    Shape, dtype, explicit sharding and varying axes of a shard_map all come from there.
    """

    def abstract_eval(*avals, **params):
        strong = map(strong_type, avals)
        closed = jax.make_jaxpr(lambda *operands: function(*operands, **params))(*strong)
        (out,) = closed.out_avals
        return out

    return abstract_eval
