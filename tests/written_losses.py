"""Losses over a vocabulary as people write them, and what `accelerate` makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from accelerated import equations
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm.losses import softmax as sm
from jax_tcgemm.passes.losses import calls as loss_calls
from jax_tcgemm.passes.losses import programs as loss_programs

TOKENS, DEPTH, VOCABULARY = 40, 24, 120
# Tests have several devices.
accelerate = functools.partial(jax_tcgemm.accelerate, losses=True)


def of_any_size(monkeypatch):
    """Losses of tests are smaller than those that gain."""
    for name in ("_LEAST_BYTES", "_LEAST_BYTES_AGAIN", "_LEAST_VOCABULARY"):
        monkeypatch.setattr(loss_programs, name, 0)
    monkeypatch.setattr(sm, "_FEW_LOGITS", 0)


def operands(dtype="float64", seed=0, shape=(TOKENS,)):
    labels = np.random.default_rng([seed, 3]).integers(0, VOCABULARY, shape)
    x, w = draw((*shape, DEPTH), dtype, seed), draw((DEPTH, VOCABULARY), dtype, seed + 1)
    w = jnp.asarray(np.asarray(w) * np.asarray(0.5, w.dtype))
    return x, w, jnp.asarray(labels, jnp.int32)


def losses_in(f, *arguments):
    """What the program of an accelerated function has of losses, without their sizes."""
    found = [str(eqn.params.get("name")) for eqn in equations(f, *arguments, losses=True)]
    prefix = f"{loss_calls.NAME}_"
    return [n.removeprefix(prefix).rpartition("_")[0] for n in found if n.startswith(prefix)]


def wide(z):
    return z.astype(jnp.promote_types(z.dtype, jnp.float32))


def at(z, labels):
    return jnp.take_along_axis(z, labels[..., None], -1)[..., 0]


def hot(labels, like):
    return jax.nn.one_hot(labels, VOCABULARY, dtype=like.dtype)


# Of logits and labels, a number for each token, as people write it.
WRITTEN = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, hot(y, z)),
    "log_softmax": lambda z, y: -at(jax.nn.log_softmax(z), y),
    "log_softmax, one-hot": lambda z, y: -jnp.sum(hot(y, z) * jax.nn.log_softmax(z), -1),
    "logsumexp": lambda z, y: jax.nn.logsumexp(z, -1) - at(z, y),
    "where": lambda z, y: (
        jax.nn.logsumexp(z, -1)
        - jnp.sum(jnp.where(y[..., None] == jnp.arange(VOCABULARY), z, 0), -1)
    ),
    "by hand": lambda z, y: (
        jnp.log(jnp.sum(jnp.exp(z - z.max(-1, keepdims=True)), -1)) + z.max(-1) - at(z, y)
    ),
    "normalised": lambda z, y: -at(z - jax.nn.logsumexp(z, -1, keepdims=True), y),
}


def check(f, *arguments, kinds, tolerance=1e-11):
    assert losses_in(f, *arguments) == kinds
    found, expected = (jax.jit(g)(*arguments) for g in (accelerate(f), f))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
