"""How XLA is asked for products: on the CPU so that it compiles, on a GPU as users write them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm.system import jax_internals

BF16 = jnp.bfloat16
# Rows, columns and k of which XLA:CPU has no product of bfloat16 in float32 with a transposed lhs.
M, N, K = 5, 9, 7


def by_columns(f):
    """A function of an operand that XLA lays out by columns, as a gather of columns is."""
    return lambda x, order, *rest: f(x[:, order], *rest)


PRODUCTS = {
    "float32": lambda x, w, b: jax_tcgemm.matmul(x, w, preferred_element_type=jnp.float32),
    "linear": lambda x, w, b: jax_tcgemm.linear(x, w, b, activation="silu"),
    "epilogue": lambda x, w, b: jax_tcgemm.matmul(x, w, epilogue=lambda acc: acc.astype(BF16) * 2),
    "gated": lambda x, w, b: jax_tcgemm.gated_linear(x, jnp.stack((w, w), 1)),
    "einsum": lambda x, w, b: jax_tcgemm.tensor.einsum(
        "mk,kn->mn", x, w, preferred_element_type=jnp.float32
    ),
}
EXACT = {
    "float32": lambda x, w, b: x @ w,
    "linear": lambda x, w, b: jax.nn.silu(x @ w + b),
    "epilogue": lambda x, w, b: 2 * (x @ w),
    "gated": lambda x, w, b: jax.nn.silu(x @ w) * (x @ w),
    "einsum": lambda x, w, b: x @ w,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_laid_out_by_columns(name):
    x, w, b = (draw(shape, BF16) for shape in ((M, K), (K, N), (N,)))
    order = np.random.default_rng(0).permutation(K)
    got = jax.jit(by_columns(PRODUCTS[name]))(x, jnp.asarray(order), w, b)
    exact = EXACT[name](*(np.asarray(a, np.float64) for a in (x[:, order], w, b)))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-7, atol=2**-5)


def test_without_layouts_nothing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.layout", None)
    x = jnp.ones((2, 3))
    assert jax_internals.row_major(x) is x


ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_small_layer_is_the_expression_of_users_on_a_gpu(name):
    """With a wider product XLA would not add the bias and apply relu in cuBLASLt's kernel."""
    types = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((10, 57), (57, 690), (690,))]

    def operations(f):
        text = jax.jit(f).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
        lines = [line for line in text.splitlines() if "stablehlo." in line]
        return [line for line in lines if "broadcast_in_dim" not in line]

    def ours(x, w, b):
        return jax_tcgemm.linear(x, w, b, activation=name)

    assert {c.implementation for c in jax_tcgemm.explain(ours, *types, platform="cuda")} == {"xla"}
    products = [x for x in operations(ours) if "dot_general" in x]
    assert products == [
        x for x in operations(lambda x, w, b: ACTIVATIONS[name](x @ w + b)) if "dot_general" in x
    ]
    assert not any("f32" in x for x in operations(ours))
