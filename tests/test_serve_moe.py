"""The example that serves experts in MXFP4, at a size for CI."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "serve_moe.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("serve_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_moe", module)
    spec.loader.exec_module(module)
    return module


def test_both_weights_have_the_same_tokens_and_logits(example):
    size, console = example.SIZES["tiny"], Console(quiet=True)
    params = (example.make_params(size, jax.random.key(0), kind) for kind in ("mxfp4", "bf16"))
    packed, wide = (example.serve(size, own, "", 3, 4, console) for own in params)
    np.testing.assert_array_equal(packed["tokens"], wide["tokens"])
    difference = np.linalg.norm(packed["logits"] - wide["logits"])
    assert 0.5 < np.std(wide["logits"]) < 2
    assert difference < 2e-2 * np.linalg.norm(wide["logits"])
    assert packed["bytes"] < 0.6 * wide["bytes"]
    assert packed["tokens_per_second"] > 0


def test_a_mixture_is_that_of_one_token_and_one_expert_at_a_time(example):
    size = example.SIZES["tiny"]
    layer = example.make_layer(jax.random.key(1), size, "mxfp4")
    x = jax.random.normal(jax.random.key(2), (5, size.width), jnp.bfloat16) * 4
    got = jax.jit(example.mixture, static_argnums=0)(size, x, layer)

    up, down = (np.asarray(layer[name].dequantize(jnp.float32)) for name in ("up", "down"))
    up_bias, down_bias = (np.float64(layer[name]) for name in ("up_bias", "down_bias"))
    router, router_bias = map(np.float64, layer["router"])
    expected, largest = np.zeros(x.shape), 0
    for i, token in enumerate(np.float64(x)):
        logits = token @ router + router_bias
        chosen = np.argsort(-logits)[:4]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for weight, e in zip(weights, chosen, strict=True):
            gate, linear = (token @ up[e, :, j] + up_bias[e, j] for j in (0, 1))
            largest = max(largest, gate.max(), abs(linear).max())
            gate, linear = np.minimum(gate, 7), np.clip(linear, -7, 7)
            hidden = (linear + 1) * gate / (1 + np.exp(-1.702 * gate))
            expected[i] += weight * (hidden @ down[e] + down_bias[e])
    assert largest > 7  # The clipping shows.
    np.testing.assert_allclose(np.float64(got), expected, rtol=2e-2, atol=0.1)


def test_top_experts_are_those_of_top_k(example):
    # Few values, so that many logits are equal.
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 4, (6, 16)), jnp.float32)
    for got, expected in zip(example.top_experts(logits, 5), jax.lax.top_k(logits, 5), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_gate_and_up_are_columns_by_turns(example):
    assert example.separated(jnp.arange(6)).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_a_sink_takes_part_in_the_softmax_of_its_head(example):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((3, 2, 2, 8), (3, 2, 5, 8), (3, 2, 5, 8)))
    sinks, position = rng.standard_normal(4), 2
    got = example.attention(*map(jnp.float32, (q, k, v, sinks)), position)
    e = np.exp(np.einsum("bhgd,bhsd->bhgs", q, k[:, :, : position + 1]) * 8**-0.5)
    total = e.sum(-1, keepdims=True) + np.exp(sinks).reshape(2, 2, 1)
    expected = np.einsum("bhgs,bhsd->bhgd", e / total, v[:, :, : position + 1])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
