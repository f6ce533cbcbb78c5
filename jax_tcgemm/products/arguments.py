"""Checks and canonical forms of the arguments of the public functions."""

import functools
import itertools
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import MAX_EXTENT, accumulator_dtype
from jax_tcgemm.problem.operands.packed_weight import PackedWeight
from jax_tcgemm.problem.operands.quantized import is_quantized
from jax_tcgemm.selection import check_names
from jax_tcgemm.sharding.layout import canonical_spec
from jax_tcgemm.system.invariance import invariance
from jax_tcgemm.system.jax_internals import converted

# The number of rows for which a batch-invariant call selects its kernel by default.
_MANY_ROWS = 4096


def call_options(
    op: str, implementation=None, config=None, batch_invariant=False, kind: str = "gemm"
) -> CallOptions:
    """Check the options of a call and return them.

    Args:
      op: the public function, for messages.
      implementation: argument of the public function.
      config: argument of the public function.
      batch_invariant: argument of the public function: a flag, a number of rows, or None for the
        setting of `jax_tcgemm.batch_invariant`.
      kind: kind of problem, as for `selection.check_names`.

    Raises:
      TypeError: for another type of batch_invariant, and for names that are not strings.
      ValueError: for unknown names, and for an implementation together with batch_invariant.
    """
    check_names(op, implementation, config, kind)
    if batch_invariant is None:
        rows = invariance.value if implementation is None else 0
    else:
        rows = rows_that_decide(op, "batch_invariant", batch_invariant)
    if rows == 0:
        return CallOptions(op, implementation, config)
    if kind == "packed":
        raise ValueError(
            f"{op}: batch_invariant must be False with a packed weight, got {batch_invariant=}; "
            "the order of its sums follows the number of rows; dequantize it"
        )
    if implementation is not None:
        raise ValueError(
            f"{op}: implementation must be None with batch_invariant=True, got {implementation=}; "
            "one with its config is the same for any rows, too"
        )
    return CallOptions(op, invariant_rows=rows)


def rows_that_decide(op: str, name: str, value) -> int:
    """Number of rows for which a batch-invariant call selects its kernel; 0 for False.

    Raises:
      TypeError: if the value is neither a flag nor an integer.
      ValueError: if the value is a number below 2.
    """
    if isinstance(value, bool | np.bool_):
        return _MANY_ROWS if value else 0
    if not isinstance(value, int | np.integer):
        raise TypeError(
            f"{op}: {name} must be True, False, None or a number of rows, got {name} of type "
            f"{type(value).__name__}; it is part of the program"
        )
    if not 2 <= value <= MAX_EXTENT:
        raise ValueError(
            f"{op}: {name} must be at least 2 and below 2**31 if it is a number of rows, got "
            f"{name}={value}; True stands for {_MANY_ROWS}"
        )
    return int(value)


class ShapeError(ValueError, TypeError):
    """Error of shapes that do not match. JAX's own products raise a TypeError in this case."""


def as_array(op: str, name: str, x) -> jax.Array:
    """Return `x` as a JAX array or tracer of a numeric dtype, with dimensions below 2**31.

    Raises:
      TypeError: if x is not an array or scalar of a numeric dtype.
      ValueError: if a dimension is too large.
    """
    if isinstance(x, PackedWeight) or is_quantized(x):
        raise TypeError(
            f"{op}: {name} must be an array, got {name} of type {type(x).__name__}; dequantize it "
            "first"
        )
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return _converted(op, name, x)
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
    return x if isinstance(x, jax.Array) else _converted(op, name, x)


def as_floating(op: str, name: str, x) -> jax.Array:
    """Return `x` as an array of a real floating-point dtype; see `as_array`.

    Raises:
      TypeError: under the conditions of `as_array`, and for another dtype.
      ValueError: under the conditions of `as_array`.
    """
    x = as_array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{op}: {name} must be of a real floating-point dtype, got {name}.dtype={x.dtype}; "
            "convert it"
        )
    return x


def _converted(op: str, name: str, x) -> jax.Array:
    """Convert a number, or an array of another library, to a JAX array."""
    if not (isinstance(x, bool | int | float | complex) or hasattr(x, "dtype")):
        raise TypeError(
            f"{op}: {name} must be an array, got {name} of type {type(x).__name__}; "
            "use jax.numpy.asarray"
        )
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{op}: {name} must be what jax.numpy.asarray takes, got {name} of type "
            f"{type(x).__name__}: {error}; convert it first"
        ) from None


def check_broadcasts(op: str, name: str, x, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless an array broadcasts to a shape."""
    tail = shape[len(shape) - x.ndim :]
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape, tail, strict=True)):
        raise ValueError(
            f"{op}: {name} must broadcast to the shape {shape}, got {name}.shape={x.shape}; "
            "add dimensions of size 1"
        )


def check_addend(op: str, name: str, x, shape: tuple[int, ...], dtype) -> None:
    """Check that an array broadcasts to a shape and that the result's dtype can hold its kind.

    Raises:
      TypeError: if x is complex and the result real, or x is inexact and the result is not.
      ValueError: if x does not broadcast.
    """
    check_broadcasts(op, name, x, shape)
    for kind in (jnp.complexfloating, jnp.inexact):
        if jnp.issubdtype(x.dtype, kind) and not jnp.issubdtype(dtype, kind):
            raise TypeError(
                f"{op}: {name} must be of a kind that the result can hold, got {name}.dtype="
                f"{x.dtype} and a result of {dtype}; convert it or set preferred_element_type"
            )


def check_flag(op: str, name: str, value) -> bool:
    """Return a flag as a bool; raise TypeError for any other value."""
    if not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1):
        raise TypeError(
            f"{op}: {name} must be True or False, got {name} of type {type(value).__name__}; "
            "it is part of the program"
        )
    return bool(value)


def real_number(op: str, name: str, value) -> float:
    """Return a real number as a float.

    Raises:
      TypeError: if the value is not a real number.
      ValueError: if a float cannot hold the value.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"{op}: {name} must be a real number, got {name} of type {type(value).__name__}; "
            "multiply the result by an array"
        )
    return in_range(op, name, float, value)


def in_range(op: str, name: str, kind: type, value) -> float | complex:
    """Convert a number to `kind`, float or complex; raise ValueError if it does not fit."""
    try:
        return kind(value)
    except OverflowError:
        raise ValueError(
            f"{op}: {name} must be at most 1.8e308, got {name} of more digits; scale the arrays"
        ) from None


def _is_numeric(dtype) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def as_integers(op: str, name: str, x) -> jax.Array:
    """Return sizes, offsets or indices as int32, clipped to its range."""
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
    """Return a `preferred_element_type` as the dtype that JAX gives an array of this dtype.

    Raises:
      TypeError: if it is not a numeric dtype.
    """
    if dtype is None:
        return None
    try:
        canonical = jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        canonical = None
    if canonical is None or not _is_numeric(canonical):
        raise TypeError(
            f"{op}: preferred_element_type must be a numeric dtype, got "
            f"preferred_element_type={dtype!r}; None takes the operands'"
        )
    return np.dtype(canonical)


def promoted_dtype(op: str, *operands) -> np.dtype:
    """Return the dtype that arrays or dtypes promote to; raise TypeError if there is none."""
    try:
        return jnp.result_type(*operands)
    except ValueError:
        dtypes = " and ".join(str(getattr(x, "dtype", x)) for x in operands)
        raise TypeError(
            f"{op}: operands must have dtypes that promote to one, got {dtypes}; convert one"
        ) from None


def promoted_type(op: str, *arrays) -> tuple[np.dtype, bool]:
    """Return the dtype of a product of arrays, and whether it is a weak type."""
    dtype = promoted_dtype(op, *arrays)
    scalars = [jax.ShapeDtypeStruct((), x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    # No integer dtype holds both int64 and uint64: JAX promotes them to a weak float.
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    is_of_integers = not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
    if not any(scalar.weak_type for scalar in scalars) and not (is_float and is_of_integers):
        return dtype, False
    product = jax.eval_shape(lambda *xs: functools.reduce(jnp.multiply, xs), *scalars)
    return product.dtype, product.weak_type


def weakened(x: jax.Array) -> jax.Array:
    """Return `x` with a weak type."""
    return converted(x, x.dtype, weak_type=True)


def check_manual(op: str, name: str, axes) -> None:
    """Raise ValueError unless `axes` is a mesh axis that is manual here, or several."""
    names = axes if isinstance(axes, tuple) else (axes,)
    try:
        lax.axis_size(axes)
        # An axis of jax.vmap has a size, too.
        is_manual = {*names} <= {*jax.sharding.get_abstract_mesh().manual_axes}
    except (NameError, TypeError, ValueError):
        is_manual = False
    if not is_manual:
        raise ValueError(
            f"{op}: {name} must be a mesh axis that is manual here, got {name}={axes!r}; call it "
            "inside jax.shard_map"
        )


def canonical_sharding(op: str, sharding, ndim: int) -> NamedSharding | None:
    """Return an `out_sharding` of a result with `ndim` dimensions as a NamedSharding or None.

    Raises:
      TypeError: if it is not a NamedSharding, a PartitionSpec or None.
      ValueError: if it has more entries than there are dimensions, or names an axis that is not an
        explicit axis of its mesh.
    """
    if sharding is None:
        return None
    if isinstance(sharding, PartitionSpec):
        try:
            sharding = NamedSharding(jax.sharding.get_abstract_mesh(), sharding)
        except Exception as error:  # Duplicates are neither a ValueError nor a TypeError.
            raise ValueError(
                f"{op}: out_sharding must name axes of the mesh, each once, got {sharding}: "
                f"{error}; see jax.set_mesh"
            ) from None
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


def accumulating(dtype: np.dtype, *operands: jax.Array) -> list[jax.Array]:
    """Convert operands to `dtype` if their product accumulates in fewer bits than `dtype` has."""
    acc = accumulator_dtype(*(x.dtype for x in operands[:2]))
    is_wider = dtype.kind == acc.kind and dtype.itemsize > acc.itemsize
    return [x.astype(dtype) if is_wider else x for x in operands]
