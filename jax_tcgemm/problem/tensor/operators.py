"""cuTENSOR's unary and binary operators, and what they are in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

UNARY = {
    "identity": lambda x: x,
    "sqrt": jnp.sqrt,
    "relu": jax.nn.relu,
    "conj": jnp.conj,
    "rcp": lambda x: 1 / x,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "log": jnp.log,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "swish": jax.nn.swish,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
}

BINARY = {"add": jnp.add, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}

REDUCTIONS = {"add": jnp.sum, "mul": jnp.prod, "max": jnp.max, "min": jnp.min}

# Not functions of a complex number, or not to complex numbers.
_REAL_ONLY = frozenset(
    {"relu", "abs", "ceil", "floor", "sigmoid", "mish", "swish", "softplus", "softsign"}
    | {"max", "min"}
)


def canonical(op: str, name: str, operator, dtype: np.dtype, known) -> str:
    """The operator; identity for the conjugate of real numbers.

    Raises:
      ValueError: when it is not `known` or not defined for the dtype.
    """
    if not isinstance(operator, str) or operator not in known:
        raise ValueError(
            f"{op}: {name} must be one of {', '.join(known)}, got {name}={operator!r}; "
            "apply other functions with jax.numpy"
        )
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if operator in _REAL_ONLY and is_complex:
        raise ValueError(
            f"{op}: {name} must be defined for complex numbers, got {name}={operator!r} for "
            f"{np.dtype(dtype)}; take the real part first"
        )
    return "identity" if operator == "conj" and not is_complex else operator


def scaled(x: jax.Array, scalar: complex) -> jax.Array:
    """`scalar * x`, without a multiplication by 1, in the dtype of x."""
    if scalar == 1:
        return x
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        scalar = scalar.real
    return lax.mul(x, jnp.asarray(scalar, x.dtype))
