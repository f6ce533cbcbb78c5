"""Checks and canonical forms of the arguments of losses over a vocabulary."""

import math
from operator import index

import jax.numpy as jnp
import numpy as np

from jax_tcgemm.products.arguments import (
    as_array,
    as_integers,
    check_manual,
    promoted_dtype,
    real_number,
)
from jax_tcgemm.system.jax_internals import is_tracer

_DTYPES = tuple(map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def checked_operands(op: str, x, w, bias, axis: int):
    """Check the operands and return them as arrays, with x and w of one dtype."""
    x, w = as_array(op, "x", x), as_array(op, "w", w)
    bias = None if bias is None else as_array(op, "bias", bias)
    given = {"x": x, "w": w, "bias": bias}
    for name, a in given.items():
        if a is not None:
            _check_extents(op, name, a)
    for name in ("x", "w"):
        if given[name].dtype not in _DTYPES:
            raise TypeError(
                f"{op}: {name} must be of one of the dtypes {', '.join(map(str, _DTYPES))}, got "
                f"{name}.dtype={given[name].dtype}; convert it"
            )
    fits = x.ndim >= 1 and w.ndim == 2 and x.shape[-1] == w.shape[1 - axis]
    if not fits or w.shape[axis] == 0:
        form = "(vocabulary, k)" if axis == 0 else "(k, vocabulary)"
        raise ValueError(
            f"{op}: x and w must have shapes (..., k) and {form}, got {x.shape=} and {w.shape=}; "
            "reshape one, or say which dimension is the vocabulary by vocabulary_axis"
        )
    if bias is not None:
        if bias.shape != (w.shape[axis],):
            raise ValueError(
                f"{op}: bias must have a number for each entry of the vocabulary, shape "
                f"({w.shape[axis]},), got {bias.shape=}; reshape it"
            )
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(
                f"{op}: bias must be of a real floating-point dtype, got bias.dtype={bias.dtype}; "
                "convert it"
            )
    dtype = promoted_dtype(op, x, w)
    return x.astype(dtype), w.astype(dtype), bias


def checked_labels(op: str, labels, shape: tuple[int, ...]):
    """Check labels for tokens of a shape and return them as int32."""
    labels = as_integers(op, "labels", labels)
    _check_extents(op, "labels", labels)
    if labels.shape != shape:
        raise ValueError(
            f"{op}: labels must have the shape of x without its last dimension, {shape}, got "
            f"{labels.shape=}; reshape them"
        )
    return labels


def _check_extents(op: str, name: str, a) -> None:
    if not all(isinstance(extent, int) for extent in a.shape):
        raise ValueError(
            f"{op}: {name} must have a shape of numbers, got {name}.shape={a.shape}; export a "
            "program for each"
        )


def check_labels(op: str, labels, size: int, ignore_index: int | None) -> None:
    """Raise ValueError for labels that are known and out of range."""
    if is_tracer(labels) or not labels.is_fully_addressable:
        return
    known = np.asarray(labels)
    wrong = known[(known < 0) | (known >= size)]
    if ignore_index is not None:
        wrong = wrong[wrong != ignore_index]
    if wrong.size:
        rule = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ValueError(
            f"{op}: labels must be from 0 up to {size - 1}{rule}, got {wrong[0]} among labels; set "
            "ignore_index to leave tokens out"
        )


def canonical_index(op: str, value) -> int | None:
    """Check an `ignore_index`; raise ValueError for values that no label can have."""
    try:
        own = None if value is None else index(value)
    except TypeError:
        own = math.inf
    if (own is not None and not -(2**31) <= own < 2**31 - 1) or isinstance(value, bool):
        raise ValueError(
            f"{op}: ignore_index must be an integer of 32 bits or None, got ignore_index="
            f"{_shown(value)}; -100 is usual"
        )
    return own


def canonical_axis(op: str, value) -> int:
    """Check a `vocabulary_axis`; raise ValueError unless it is 0 or 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value not in (0, 1):
        raise ValueError(
            f"{op}: vocabulary_axis must be 0 or 1, got vocabulary_axis={_shown(value)}; 0 is that "
            "of an embedding, 1 that of a head's kernel"
        )
    return int(value)


def fraction(op: str, name: str, value) -> float:
    """Check a number from 0 to 1 and return it as a float."""
    number = at_least_zero(op, name, value)
    if number > 1:
        raise ValueError(f"{op}: {name} must be from 0 to 1, got {name}={number}; 0 leaves it out")
    return number


def at_least_zero(op: str, name: str, value) -> float:
    """Check a finite number of at least 0 and return it as a float."""
    number = real_number(op, name, value)
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{op}: {name} must be at least 0 and finite, got {name}={number}; 0 leaves it out"
        )
    return number


def canonical_cap(op: str, value) -> float | None:
    """Check a `soft_cap`, None or a positive finite number."""
    number = None if value is None else real_number(op, "soft_cap", value)
    if number is not None and not 0 < number < math.inf:
        raise ValueError(
            f"{op}: soft_cap must be above 0 and finite, got soft_cap={number}; None leaves it out"
        )
    return number


def canonical_bytes(op: str, value) -> int | None:
    """Check a `chunk_bytes`, None or a bound on the bytes of a chunk."""
    try:
        own = None if value is None else index(value)
    except TypeError:
        own = 0
    if (own is not None and own < 1) or isinstance(value, bool):
        raise ValueError(
            f"{op}: chunk_bytes must be a positive integer or None, got chunk_bytes="
            f"{_shown(value)}; None is the default"
        )
    return own


def _shown(value) -> str:
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def manual_axes(op: str, name: str, value) -> tuple[str, ...]:
    """Check names of manual mesh axes and return them as a tuple."""
    if value is None:
        return ()
    check_manual(op, name, value)
    return value if isinstance(value, tuple) else (value,)
