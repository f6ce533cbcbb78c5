"""XLA's own products, written so that XLA compiles them on every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.system.jax_internals import row_major


def dot_general(lhs: jax.Array, rhs: jax.Array, *args, platform: str, **kwargs) -> jax.Array:
    """`lax.dot_general` of operands for a platform, with its other arguments.

    On the CPU, XLA may give an operand that another operation makes the layout of its transpose,
    and has no product of bfloat16 in float32 that reads such a layout. So operands are row-major.
    """
    is_wide = kwargs.get("preferred_element_type") == jnp.float32
    if platform == "cpu" and is_wide and {lhs.dtype, rhs.dtype} == {jnp.dtype(jnp.bfloat16)}:
        lhs, rhs = row_major(lhs), row_major(rhs)
    return lax.dot_general(lhs, rhs, *args, **kwargs)
