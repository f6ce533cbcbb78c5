"""Operands of tensor operations, and their values in double precision."""

import jax.numpy as jnp
import numpy as np


def draw(shape, dtype="float64", seed=0):
    rng = np.random.default_rng([seed, *shape])
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=shape)
    return jnp.asarray(values, dtype)


def widened(x):
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)
