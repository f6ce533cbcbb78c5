"""The activations that layers know by name, as JAX functions: the one list of them."""

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

# Other names, and the functions of JAX, for which one of ours may be asked.
_ALIASES = {
    None: "none",
    "gelu": "gelu_tanh",
    jax.nn.relu: "relu",
    jax.nn.gelu: "gelu_tanh",
    jax.nn.silu: "silu",
    jax.nn.sigmoid: "sigmoid",
    jax.nn.tanh: "tanh",
    jnp.tanh: "tanh",
    jax.nn.leaky_relu: "leaky_relu",
}


def canonical_activation(op: str, activation) -> str:
    """The name of an activation that was asked for by name or as a function of JAX.

    Raises:
      TypeError: for what is neither.
      ValueError: for an unknown name or function.
    """
    try:
        name = _ALIASES.get(activation, activation)
    except TypeError:
        name = activation
    if isinstance(name, str) and name in ACTIVATIONS:
        return name
    error = ValueError if isinstance(activation, str) or callable(activation) else TypeError
    raise error(
        f"{op}: activation must be None, gelu, one of {', '.join(ACTIVATIONS)}, or jax.nn's "
        f"function of that name, got activation={activation!r}; apply others to the result"
    )
