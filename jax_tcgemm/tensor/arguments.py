"""Checks that the public functions share."""

import numbers

import jax.numpy as jnp
from jax import lax

from jax_tcgemm.products.arguments import as_array, in_range, promoted_dtype


def arrays(op: str, **operands) -> list:
    """Return the operands as arrays of the dtype that they promote to."""
    found = [as_array(op, name, x) for name, x in operands.items()]
    dtype = promoted_dtype(op, *(x.dtype for x in found))
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtypes = zip(operands, found, strict=True)
        raise TypeError(
            f"{op}: operands must be floating-point or complex, got "
            f"{', '.join(f'{name}.dtype={x.dtype}' for name, x in dtypes)}; convert them first"
        )
    return [lax.convert_element_type(x, dtype) for x in found]


def scalar(op: str, name: str, value, dtype) -> complex | float:
    """Check alpha, beta or gamma, which are static; return a float or complex number."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if isinstance(value, bool) or not isinstance(
        value, numbers.Complex if is_complex else numbers.Real
    ):
        kind = "a number" if is_complex else "a real number"
        raise TypeError(
            f"{op}: {name} must be {kind} of Python or NumPy, got {name} of type "
            f"{type(value).__name__}; multiply by an array outside"
        )
    return in_range(op, name, complex if isinstance(value, complex) else float, value)


def addend(op: str, c, beta, shape, dtype):
    """Check c and return it in the result's dtype; None if c is not read, as beta is 0."""
    if beta == 0:
        return None
    if c is None:
        raise ValueError(f"{op}: c must be given unless beta is 0, got c=None and {beta=}; pass it")
    c = as_array(op, "c", c)
    if c.shape != shape:
        raise ValueError(
            f"{op}: c must have the result's shape, got c.shape={c.shape} and {shape}; "
            "broadcast or transpose it"
        )
    if jnp.iscomplexobj(c) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{op}: c must be real where the operands are, got c.dtype={c.dtype} and a result of "
            f"{dtype}; convert one of them"
        )
    return lax.convert_element_type(c, dtype)
