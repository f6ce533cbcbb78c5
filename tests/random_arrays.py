"""Normally distributed arrays, drawn by NumPy: JAX would compile a generator for each shape."""

import jax
import jax.numpy as jnp
import numpy as np


def draw(shape, dtype="float64", seed=0):
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    # jnp.asarray would compile a program for the shape.
    return jax.device_put(values.astype(jnp.dtype(dtype)))


def normal(*shape, seed=0, dtype="float32"):
    return draw(shape, dtype, seed)


def widened(x):
    """In double precision, exactly."""
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)
