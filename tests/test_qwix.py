"""Qwix with our products: the same values as its own, by our calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from random_arrays import normal

import jax_tcgemm

qwix = pytest.importorskip("qwix")

X = normal(16, 256)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(128)(x))
        w = self.param("w", linen.initializers.lecun_normal(), (128, 4, 32))
        return jnp.einsum("bk,khd->bhd", x, w)


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("tile_size", [None, 128])
def test_provider(qtype, activations, tile_size):
    from jax_tcgemm.quantization.qwix import PtqProvider

    act_qtype = qtype if activations else None
    rule = qwix.QuantizationRule(weight_qtype=qtype, act_qtype=act_qtype, tile_size=tile_size)
    model = Model()
    parameters = model.init(jax.random.key(0), X)
    theirs, ours = (
        qwix.quantize_model(model, kind([rule])) for kind in (qwix.PtqProvider, PtqProvider)
    )
    types = jax.eval_shape(theirs.init, jax.random.key(0), X)["params"]
    quantized = {"params": qwix.quantize_params(parameters["params"], types)}
    expected = np.asarray(theirs.apply(quantized, X), np.float64)
    got = np.asarray(ours.apply(quantized, X), np.float64)
    # A rounding of the first layer's sums moves few of the second one's operands by a step.
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2 * abs(expected).max())
    assert np.linalg.norm(got - expected) < 5e-3 * np.linalg.norm(expected)
    exact = np.asarray(model.apply(parameters, X), np.float64)
    assert 0 < np.linalg.norm(got - exact) < 0.1 * np.linalg.norm(exact)
    assert len(jax_tcgemm.explain(ours.apply, quantized, X)) == 2


def test_arrays_of_qwix():
    x = qwix.quantize(X, "int8", channelwise_axes=(0,))
    w = qwix.quantize(normal(64, 256, seed=1), "int8", channelwise_axes=(0,))
    numbers = (((1,), (1,)), ((), ()))
    got = jax_tcgemm.dot_general(x, w, numbers)
    np.testing.assert_allclose(got, qwix.dot_general(x, w, numbers), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(jax_tcgemm.dequantize(x), qwix.dequantize(x))
