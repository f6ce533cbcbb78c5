"""Argument checks that the BLAS functions share, and the bind of their primitive."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives.blas import bind as bind_call
from jax_tcgemm.problem.blas.call import Call, Options, scale_dtype, span
from jax_tcgemm.problem.dtypes import MAX_EXTENT
from jax_tcgemm.products.arguments import as_array, in_range, promoted_dtype
from jax_tcgemm.selection import check_names

_DTYPES = tuple(
    np.dtype(t)
    for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128)
)


def check_options(op: str, implementation, options) -> None:
    """Raise for an unknown implementation or options of another type."""
    check_names(op, implementation, kind="blas")
    if not isinstance(options, Options):
        raise TypeError(
            f"{op}: options must be a blas.Options, got options={options!r}; "
            "see jax_tcgemm.blas.Options"
        )


def arrays(op: str, ranks: dict[str, int], optional: str = "", **given) -> list:
    """Check the arrays of a call and convert them to JAX arrays of one BLAS dtype.

    Args:
      op: the function.
      ranks: for each name, the number of dimensions without batch dimensions.
      optional: the name of an array that may be None, which is returned as None.
      **given: the arrays by name.
    """
    found = {
        name: x if x is None and name == optional else as_array(op, name, x)
        for name, x in given.items()
    }
    present = {name: x for name, x in found.items() if x is not None}
    dtype = promoted_dtype(op, *present.values())
    for name, x in present.items():
        if x.ndim < ranks[name]:
            raise ValueError(
                f"{op}: {name} must have at least {ranks[name]} dimension"
                f"{'s' if ranks[name] > 1 else ''}, got {name}.shape={x.shape}; reshape it"
            )
    if dtype not in _DTYPES:
        names = ", ".join(present)
        raise TypeError(
            f"{op}: {names} must have one of the dtypes {', '.join(map(str, _DTYPES))}, got "
            f"dtype={dtype}; convert with astype"
        )
    return [x if x is None else lax.convert_element_type(x, dtype) for x in found.values()]


def check_integer(op: str, name: str, value, least: int, remedy: str) -> int:
    """Check an integer, from `least` to the largest dimension size, and return it as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(
            f"{op}: {name} must be an integer of at least {least}, got {name}={value!r}; {remedy}"
        )
    if value > MAX_EXTENT:
        raise ValueError(
            f"{op}: {name} must be at most 2**31 - 1, got {name}={value}; no array is longer"
        )
    return int(value)


def check_increment(op: str, name: str, value) -> int:
    """Check an increment, a positive integer. Values above the largest size are clipped to it."""
    if isinstance(value, int | np.integer):
        value = min(value, MAX_EXTENT)
    return check_integer(op, name, value, 1, "reverse a vector with x[..., ::-1]")


def check_choice(op: str, name: str, value, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{op}: {name} must be one of {', '.join(allowed)}, got {name}={value!r}; "
            "see its documentation"
        )


def transposition(op: str, name: str, value, dtype) -> str:
    """Check a transposition, "N", "T" or "C"; for real matrices, return "T" for "C"."""
    check_choice(op, name, value, ("N", "T", "C"))
    return "T" if value == "C" and np.dtype(dtype).kind != "c" else value


def check_square(op: str, a) -> None:
    """Raise ValueError for a matrix that is not square."""
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(
            f"{op}: a must be square, got a.shape={a.shape}; only square triangles can be solved"
        )


def check_shape(op: str, name: str, x) -> tuple[int, ...]:
    """Return the shape of an array; raise ValueError if it is symbolic."""
    if not all(isinstance(extent, int) for extent in x.shape):
        raise ValueError(
            f"{op}: {name} must have a known shape, got {name}.shape={x.shape}; fix its extents"
        )
    return x.shape


def check_span(op: str, name: str, x, n: int, step: int) -> None:
    """Raise ValueError for a vector that is too short for n elements `step` apart."""
    if not _is_at_least(x.shape[-1], span(n, step)):
        raise ValueError(
            f"{op}: {name} must hold {n} elements {step} apart, {span(n, step)} in all, got "
            f"{name}.shape={x.shape}; pass a longer one or a smaller increment"
        )


def _is_at_least(extent, least) -> bool:
    """Whether the size of a dimension is known to be large enough."""
    try:
        return extent >= least
    except Exception:  # Symbolic sizes that cannot be compared; the exception has no public name.
        return False


def vector_length(op: str, n, **vectors) -> int:
    """Common number of elements of vectors, given as (array, increment) by name."""
    if n is None:
        lengths = {name: -(-x.shape[-1] // step) for name, (x, step) in vectors.items()}
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"{length} of {name}" for name, length in lengths.items())
            raise ValueError(
                f"{op}: the vectors must have as many elements, got {got}; pass n= to say how many"
            )
        return next(iter(lengths.values()))
    n = check_integer(op, "n", n, 0, "None takes all")
    for name, (x, step) in vectors.items():
        check_span(op, name, x, n, step)
    return n


def scalars(op: str, dtype, **given) -> tuple[dict, tuple]:
    """Check the scalars of a call; they become parameters, or operands if one is an array.

    Args:
      op: the function.
      dtype: dtype of the arrays of the call.
      **given: alpha, and beta if the function has it; empty for functions without scalars.

    Returns:
      Changes to a `Call`, and operands to append.
    """
    is_complex = np.dtype(dtype).kind == "c"
    for name, value in given.items():
        is_array = hasattr(value, "dtype") and as_array(op, name, value).ndim == 0
        if not is_array and not isinstance(value, int | float | complex):
            raise TypeError(
                f"{op}: {name} must be a scalar, got {name}={value!r}; vmap over a vector of them"
            )
        if not is_complex and jnp.iscomplexobj(value):
            raise TypeError(
                f"{op}: {name} must be real for arrays of {dtype}, got {name}={value!r}; "
                "convert the arrays"
            )
    if not any(isinstance(value, jax.Array) for value in given.values()):
        return {name: in_range(op, name, complex, value) for name, value in given.items()}, ()
    given = {"beta": 0.0} | given
    scale = scale_dtype(dtype)
    return {"scalar_args": True}, tuple(
        jnp.asarray(given[name]).astype(scale) for name in ("alpha", "beta")
    )


def bind(call: Call, *operands):
    """Bind the primitive to operands whose batch dimensions broadcast; return its results."""
    batch_ranks = [x.ndim - rank for x, rank in zip(operands, call.operand_ranks, strict=True)]
    most = max(batch_ranks)
    operands = [
        lax.expand_dims(x, range(most - own)) if own < most else x
        for x, own in zip(operands, batch_ranks, strict=True)
    ]
    _batch_shape(call.op, operands, call.operand_ranks)
    return bind_call(call, *operands)


def with_one_batch(op: str, *matrices) -> list:
    """Broadcast the batch dimensions of matrices to one shape; None stays None."""
    present = [x for x in matrices if x is not None]
    batch = _batch_shape(op, present, [2] * len(present))
    return [x if x is None else jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in matrices]


def _batch_shape(op: str, operands: Sequence, ranks: Sequence[int]) -> tuple:
    """Return the shape that batch dimensions broadcast to; raise ValueError if there is none."""
    try:
        return lax.broadcast_shapes(
            *(x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True))
        )
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in operands)
        raise ValueError(
            f"{op}: batch dimensions must broadcast, got arrays of shapes {shapes}; "
            "sizes must be equal or 1"
        ) from None
