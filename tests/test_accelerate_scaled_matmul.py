"""`jax.nn.scaled_matmul` under `accelerate`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_formats import FORMATS, of_format

import jax_tcgemm
from jax_tcgemm.passes import other_products
from jax_tcgemm.selection import devices


def product(x, w, s, t, **how):
    return jax.nn.scaled_matmul(*(a[None] for a in (x, w, s, t)), **how)[0]


def layer(x, w, s, t):
    return jax.nn.relu(product(x, w, s, t) + 1)


@pytest.mark.parametrize("name", FORMATS)
def test_values(name):
    operands, expected = of_format(name)
    got = jax.jit(jax_tcgemm.accelerate(layer))(*operands)
    expected = np.maximum(expected + 1, 0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * abs(expected).max())
    (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(layer), *operands, platform="cuda")
    assert str(call.problem).startswith("24x56x192 NT bf16->f32")


def test_batches_and_dtypes():
    operands, expected = of_format("MXFP8")
    stacked = [jnp.stack([x, x]) for x in operands]

    def f(*operands):
        return jax.nn.scaled_matmul(*operands, preferred_element_type=jnp.bfloat16)

    got = jax_tcgemm.accelerate(f)(*stacked)
    assert (got.shape, got.dtype) == ((2, 24, 56), jnp.bfloat16)
    bound = 2**-8 * abs(expected).max()
    np.testing.assert_allclose(got.astype(np.float32), [expected] * 2, rtol=0, atol=bound)
    mapped = jax.vmap(jax_tcgemm.accelerate(product), (0, None, 0, None))
    got = mapped(stacked[0], operands[1], stacked[2], operands[3])
    np.testing.assert_allclose(got, [expected] * 2, rtol=0, atol=1e-6 * abs(expected).max())


def test_gpus_that_multiply_the_operands_as_they_are(monkeypatch):
    blackwell = dataclasses.replace(devices.ASSUMED_GPU, compute_capability=100)
    monkeypatch.setattr(other_products, "target_device", lambda platform: blackwell)
    operands, _ = of_format("MXFP4")
    text = str(jax.make_jaxpr(jax_tcgemm.accelerate(product))(*operands))
    assert "scaled_matmul_wrapper" in text
    assert "tcgemm" not in text


def test_scales_that_bfloat16_cannot_apply_stay():
    x, w, s, t = of_format("MXFP8")[0]
    s, t = (scales.astype(jnp.bfloat16) for scales in (s, t))
    text = str(jax.make_jaxpr(jax_tcgemm.accelerate(product))(x, w, s, t))
    assert "scaled_matmul_wrapper" in text
    assert "tcgemm" not in text
