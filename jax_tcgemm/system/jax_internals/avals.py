"""Types of arrays: mesh axes, weak types, and types of results."""

import functools

import jax
from jax import lax
from jax.extend.core.primitives import convert_element_type_p, dot_general_p
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.system.jax_internals.rules import Zero
from jax_tcgemm.system.routing import routing


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which an array, or a type, varies, inside of a shard_map."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())


def zero_tangent(x: jax.Array):
    """The tangent of a result that does not move."""
    aval = jax.typeof(x)
    return Zero(aval.to_tangent_aval() if hasattr(aval, "to_tangent_aval") else aval)


def strong_type(aval):
    """A type that is not weak."""
    return aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval


def with_partitions(spec: PartitionSpec, partitions) -> PartitionSpec:
    """A spec that differs in how dimensions are divided only."""
    if hasattr(spec, "update"):
        return spec.update(partitions=tuple(partitions))
    return PartitionSpec(*partitions, unreduced=spec.unreduced, reduced=spec.reduced)


def product_type(lhs, rhs, **params):
    """The type of `lax.dot_general(lhs, rhs, **params)`."""
    try:
        return dot_general_p.abstract_eval(lhs, rhs, **params)[0]
    except (AttributeError, TypeError):
        pass  # Also where operands do not go together, which is said again here.
    with routing(None):
        return jax.make_jaxpr(functools.partial(lax.dot_general, **params))(lhs, rhs).out_avals[0]


def like(aval, shape, dtype, sharding: NamedSharding):
    """The type of an array that varies over the manual mesh axes that one of type `aval` does."""
    if hasattr(aval, "update"):
        return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding)


def converted(x: jax.Array, dtype, *, weak_type: bool) -> jax.Array:
    """`x` in another dtype and weak or not; not weak where JAX has another way of making that."""
    try:
        return convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)
    except TypeError:
        return lax.convert_element_type(x, dtype)
