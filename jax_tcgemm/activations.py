"""The activations that a product's epilogue can apply, as JAX functions.

The one list on this side; csrc/epilogue/activations.h is the one on the other, and a test compares
names, values and derivatives of both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _gelu_erf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": _gelu_erf,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": jax.nn.leaky_relu,
}
