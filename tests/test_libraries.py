"""Flax, Equinox and Haiku with our products: the same values, the same gradients, our calls."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library_modules import CASES, X, assert_same_values_and_gradients, loss

import jax_tcgemm


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    make, _, _ = CASES[name]
    assert_same_values_and_gradients(*make())


@pytest.mark.parametrize("name", CASES)
def test_calls_of_the_program(name, fake_cuda):
    make, num_ours, num_theirs = CASES[name]
    theirs, ours, parameters = make()

    def calls(f):
        text = jax.jit(f).trace(parameters, X).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("custom_call @tcgemm_gemm"), text.count("stablehlo.dot_general")

    assert calls(theirs) == (0, num_ours + num_theirs)
    assert calls(ours) == (num_ours, num_theirs)
    assert calls(jax.grad(loss(ours), (0, 1))) == (3 * num_ours, 3 * num_theirs)


def test_equinox_filter_transformations():
    """filter_jit and filter_grad keep caches of their own; patch reaches through them."""
    model = eqx.nn.MLP(8, 3, 16, 2, key=jax.random.key(1))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    def num_calls():
        return loss.lower(model, X[0]).as_text().count("tcgemm_gemm")

    expected = loss(model, X[0])
    assert num_calls() == 0
    with jax_tcgemm.patch(implementation="host"):
        got = loss(model, X[0])
        assert num_calls() == 8  # The input's gradient is not asked for.
    assert num_calls() == 0
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        eqx.filter(got, eqx.is_array),
        eqx.filter(expected, eqx.is_array),
    )
