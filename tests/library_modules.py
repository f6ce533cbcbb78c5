"""Modules of Flax, Equinox and Haiku, each with JAX's products and with ours."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tcgemm

X = jax.random.normal(jax.random.key(0), (2, 6, 8))

OURS = {"dot_general": jax_tcgemm.dot_general}
OURS_CLS = {"dot_general_cls": lambda: jax_tcgemm.dot_general}  # As MaxText passes it.
OURS_ATTENTION = {
    "qkv_dot_general": jax_tcgemm.dot_general,
    "out_dot_general": jax_tcgemm.dot_general,
}

# Each of these gives f(parameters, x) of a module with JAX's products, the same with ours, and the
# parameters; `hooks` are the arguments that make a module use ours, without which `patch` does.


def of_nnx(make, **hooks):
    def function(module):
        graph, state = nnx.split(module)
        return lambda state, x: nnx.merge(graph, state)(x), state

    theirs, state = function(make(rngs=nnx.Rngs(0)))
    ours, _ = function(make(rngs=nnx.Rngs(0), **hooks))
    return theirs, ours if hooks else jax_tcgemm.patch()(theirs), state


def of_linen(make, **hooks):
    theirs = make()
    return theirs.apply, make(**hooks).apply, theirs.init(jax.random.key(1), X)


def of_equinox(module, num_inputs=1, num_maps=1):
    parameters, static = eqx.partition(module, eqx.is_array)

    def theirs(parameters, x):
        apply = lambda x: eqx.combine(parameters, static)(*[x] * num_inputs)  # noqa: E731
        for _ in range(num_maps):
            apply = jax.vmap(apply)
        return apply(x)

    return theirs, jax_tcgemm.patch()(theirs), parameters


def of_haiku(make, num_inputs=1):
    transformed = hk.without_apply_rng(hk.transform(lambda x: make()(*[x] * num_inputs)))
    theirs = transformed.apply
    return theirs, jax_tcgemm.patch()(theirs), transformed.init(jax.random.key(1), X)


nnx_linear_general = partial(nnx.LinearGeneral, (6, 8), (4, 3), axis=(1, 2))
nnx_attention = partial(nnx.MultiHeadAttention, num_heads=2, in_features=8, decode=False)
linen_attention = partial(nn.MultiHeadDotProductAttention, num_heads=2)

# Name: how to get functions and parameters, products that become ours, products that stay JAX's.
CASES = {
    "nnx.Linear": (lambda: of_nnx(partial(nnx.Linear, 8, 12), **OURS), 1, 0),
    "nnx.LinearGeneral": (lambda: of_nnx(nnx_linear_general, **OURS), 1, 0),
    "nnx.LinearGeneral dot_general_cls": (lambda: of_nnx(nnx_linear_general, **OURS_CLS), 1, 0),
    "nnx.LinearGeneral batched": (
        lambda: of_nnx(partial(nnx.LinearGeneral, 8, 5, batch_axis={0: 2}), **OURS),
        1,
        0,
    ),
    "nnx.Einsum": (
        lambda: of_nnx(
            partial(nnx.Einsum, "bsd,dhk->bshk", (8, 2, 5), (2, 5)),
            einsum_op=partial(jnp.einsum, _dot_general=jax_tcgemm.dot_general),
        ),
        1,
        0,
    ),
    # The products of queries, keys and values have no hook in nnx; `patch` takes them.
    "nnx.MultiHeadAttention": (lambda: of_nnx(nnx_attention, **OURS_ATTENTION), 4, 2),
    "nnx.MultiHeadAttention patched": (lambda: of_nnx(nnx_attention), 6, 0),
    "linen.Dense": (lambda: of_linen(partial(nn.Dense, 12), **OURS), 1, 0),
    "linen.Dense dot_general_cls": (lambda: of_linen(partial(nn.Dense, 12), **OURS_CLS), 1, 0),
    "linen.DenseGeneral": (
        lambda: of_linen(partial(nn.DenseGeneral, (4, 3), axis=(-2, -1)), **OURS),
        1,
        0,
    ),
    "linen.DenseGeneral batched": (
        lambda: of_linen(partial(nn.DenseGeneral, 5, batch_dims=(0,)), **OURS_CLS),
        1,
        0,
    ),
    "linen.MultiHeadDotProductAttention": (
        lambda: of_linen(
            linen_attention,
            **OURS_ATTENTION,
            attention_fn=partial(
                nn.dot_product_attention, einsum_dot_general=jax_tcgemm.dot_general
            ),
        ),
        6,
        0,
    ),
    "equinox.MLP": (
        lambda: of_equinox(eqx.nn.MLP(8, 3, 16, 2, key=jax.random.key(1)), num_maps=2),
        3,
        0,
    ),
    "equinox.MultiheadAttention": (
        lambda: of_equinox(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(1)), num_inputs=3),
        6,
        0,
    ),
    "haiku.MLP": (lambda: of_haiku(lambda: hk.nets.MLP([16, 3])), 2, 0),
    "haiku.MultiHeadAttention": (
        lambda: of_haiku(
            lambda: hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling()),
            num_inputs=3,
        ),
        6,
        0,
    ),
}


def loss(f):
    return lambda parameters, x: jnp.sum(jnp.sin(f(parameters, x)))


def assert_same_values_and_gradients(theirs, ours, parameters):
    """In true float32: sums of at most 48 terms of order 1, through a few layers of them."""
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    with jax.default_matmul_precision("highest"):
        close(jax.jit(ours)(parameters, X), theirs(parameters, X))
        got = jax.jit(jax.grad(loss(ours), (0, 1)))(parameters, X)
        jax.tree.map(close, got, jax.grad(loss(theirs), (0, 1))(parameters, X))
