"""Arguments of the public functions, checked and in the form that primitives take."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tcgemm.primitives.layout import canonical_spec
from jax_tcgemm.problem import MAX_EXTENT


def as_array(op: str, name: str, x) -> jax.Array:
    """`x` as a JAX array or tracer of a numeric dtype whose dimensions can be indexed.

    Raises:
      TypeError: when it is not an array or scalar of a numeric dtype.
      ValueError: when a dimension is too large.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if isinstance(x, bool | int | float | complex):
        return jnp.asarray(x)
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"{op}: {name} must be an array, got {name} of type {type(x).__name__}; "
            "use jax.numpy.asarray"
        )
    if not _is_numeric(x.dtype):
        raise TypeError(
            f"{op}: {name} must have a numeric dtype, got {name}.dtype={x.dtype}; convert it first"
        )
    for axis, extent in enumerate(np.shape(x)):
        if isinstance(extent, int) and extent > MAX_EXTENT:
            raise ValueError(
                f"{op}: every dimension must be at most 2**31 - 1, got {name}.shape[{axis}]="
                f"{extent}; reshape it into two dimensions"
            )
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _is_numeric(dtype) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def as_integers(op: str, name: str, x) -> jax.Array:
    """`x` as int32: a size, offset or index beyond that means the same as the last one in it."""
    x = as_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{op}: {name} must be integers, got {name}.dtype={x.dtype}; convert it first"
        )
    if not np.can_cast(x.dtype, np.int32):
        own, int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
        x = jnp.clip(x, max(own.min, int32.min), int32.max)
    return lax.convert_element_type(x, jnp.int32)


def canonical_element_type(op: str, dtype) -> np.dtype | None:
    """A `preferred_element_type` as the dtype JAX would give an array of it.

    Raises:
      TypeError: when it is not a numeric dtype.
    """
    if dtype is None:
        return None
    try:
        canonical = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        canonical = None
    if canonical is None or not _is_numeric(canonical):
        raise TypeError(
            f"{op}: preferred_element_type must be a numeric dtype, got "
            f"preferred_element_type={dtype!r}; None takes the operands'"
        )
    return np.dtype(canonical)


def promoted_type(*arrays) -> tuple[np.dtype, bool]:
    """The dtype of a product of these arrays, and whether it is weak."""
    scalars = [jax.ShapeDtypeStruct((), x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    if not any(scalar.weak_type for scalar in scalars):
        return jnp.result_type(*(x.dtype for x in arrays)), False
    product = jax.eval_shape(lambda *xs: functools.reduce(jnp.multiply, xs), *scalars)
    return product.dtype, product.weak_type


def weakened(x: jax.Array) -> jax.Array:
    """`x` with a weak type."""
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def canonical_sharding(op: str, sharding, ndim: int) -> NamedSharding | None:
    """The `out_sharding` of a result of `ndim` dimensions as JAX's primitives take it.

    Raises:
      TypeError: when it is not a NamedSharding, a PartitionSpec or None.
      ValueError: when it has more entries than there are dimensions, or names an axis that is not
        an explicit one of its mesh.
    """
    if sharding is None:
        return None
    if isinstance(sharding, PartitionSpec):
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), sharding)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{op}: out_sharding must be a NamedSharding, a PartitionSpec or None, got "
            f"{type(sharding).__name__}; see jax.sharding"
        )
    mesh, spec = sharding.mesh.abstract_mesh, sharding.spec
    if len(spec) > ndim:
        raise ValueError(
            f"{op}: out_sharding must have an entry for each dimension of the result at most, got "
            f"{spec} for {ndim} dimensions; leave out the others"
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in itertools.chain(*canonical_spec(spec, ndim)):
        if types[axis] != AxisType.Explicit:
            raise ValueError(
                f"{op}: out_sharding must name explicit mesh axes only, got {spec} with {axis!r} "
                f"of type {types[axis].name}; use jax.lax.with_sharding_constraint"
            )
    return NamedSharding(mesh, spec)
