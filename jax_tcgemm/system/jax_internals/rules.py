"""Registries of the rules of JAX's primitives, and helpers for rules."""

import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.system.jax_internals.find import find_name

primitive_jvps = find_name("ad", "primitive_jvps", {})
primitive_transposes = find_name("ad", "primitive_transposes", {})
primitive_batchers = find_name("batching", "primitive_batchers", {})


def _find_zero() -> type:
    """The type of tangents that are zero, from what a rule is given."""
    probe, tangents = core.Primitive("tcgemm_probe"), []
    probe.def_abstract_eval(lambda x, y: x)

    def jvp(primals, its_tangents):
        tangents.extend(its_tangents)
        return primals[0], its_tangents[0]

    primitive_jvps[probe] = jvp
    jax.eval_shape(lambda x: jax.jvp(lambda x: probe.bind(x, 1.0), (x,), (x,)), 1.0)
    return type(tangents[1])


def _is_undefined_primal(x) -> bool:
    return hasattr(x, "aval") and not isinstance(x, jax.Array | np.ndarray)


def _instantiate_zeros(tangent):
    """Zeros for a tangent or cotangent that is a `Zero`, without their sharding."""
    if type(tangent) is not Zero:
        return tangent
    zeros = np.zeros if tangent.aval.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(tangent.aval.shape, tangent.aval.dtype)


def _defbilinear(primitive, transpose_lhs: Callable, transpose_rhs: Callable) -> None:
    """Differentiates a primitive that is linear in each of its two operands."""

    def jvp(primals, tangents, **params):
        (x, y), (dx, dy) = primals, tangents
        pairs = [(dx, y)] * (type(dx) is not Zero) + [(x, dy)] * (type(dy) is not Zero)
        terms = [primitive.bind(*pair, **params) for pair in pairs]
        return primitive.bind(x, y, **params), functools.reduce(lax.add, terms)

    def transpose(ct, x, y, **params):
        if type(ct) is Zero:
            return [None, None]
        if is_undefined_primal(x):
            return [transpose_lhs(ct, x, y, **params), None]
        return [None, transpose_rhs(ct, x, y, **params)]

    primitive_jvps[primitive], primitive_transposes[primitive] = jvp, transpose


class _FancyPrimitiveBatchers(dict):
    """Makes rules that are told the mapped axis of those that are not, and so know less of it."""

    def __setitem__(self, primitive, rule):
        def batch(args, dims, **params):
            size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
            axis_data = types.SimpleNamespace(size=size, explicit_mesh_axis=None)
            return rule(axis_data, args, dims, **params)

        primitive_batchers[primitive] = batch


def _apply_primitive(primitive, *args, **params):
    return _compiled(primitive, tuple(params.items()))(*args)


@functools.lru_cache(maxsize=4096)
def _compiled(primitive, params):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


Zero = find_name("ad", "Zero") or _find_zero()
is_undefined_primal = find_name("ad", "is_undefined_primal", _is_undefined_primal)

# Under the names that JAX's own modules have in every primitive's rules.
ad = types.SimpleNamespace(
    Zero=Zero,
    is_undefined_primal=is_undefined_primal,
    instantiate_zeros=find_name("ad", "instantiate_zeros", _instantiate_zeros),
    defbilinear=find_name("ad", "defbilinear", _defbilinear),
    primitive_jvps=primitive_jvps,
    primitive_transposes=primitive_transposes,
)
batching = types.SimpleNamespace(
    primitive_batchers=primitive_batchers,
    fancy_primitive_batchers=find_name(
        "batching", "fancy_primitive_batchers", _FancyPrimitiveBatchers()
    ),
)
xla = types.SimpleNamespace(apply_primitive=find_name("xla", "apply_primitive", _apply_primitive))
