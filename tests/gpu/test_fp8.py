"""Products of 8-bit floats on a GPU: every config that runs them, layouts, sums, scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import (
    CONFIG_CASES,
    LAYOUTS,
    PLAIN,
    Case,
    Types,
    device,
    implementations,
    make_inputs,
    mismatch,
    rejection,
    run_all,
    split_base,
)

import jax_tcgemm
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.gpu

NT = (((1,), (1,)), ((), ()))
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
PAIRS = ("f8e4m3fn", "f8e4m3fn,f8e5m2", "f8e5m2,f8e4m3fn", "f8e5m2")
COOPERATIVE, PING_PONG = "128x128x64_c1x1x1_co", "64x128x64_c1x1x1_pp"
CUT = Case("cut", 133, 203, 1270)

needs_hopper = pytest.mark.skipif(
    device().compute_capability != 90, reason="wgmma is for compute capability 9.0"
)


def configs(types):
    """Those without K split over the grid that run it."""
    problem = make_inputs(types, "NT", PLAIN).problem
    names = implementations().get("wgmma", [])
    return [x for x in names if not split_base(x) and not rejection("wgmma", x, problem)]


def check(inputs, config):
    results = run_all(inputs, implementation="wgmma", config=config)
    wrong = [mismatch(got, each) for got, each in zip(results, inputs, strict=True)]
    assert not any(wrong), next(filter(None, wrong))


@needs_hopper
@pytest.mark.parametrize("compute", ["f32", "f32_fast_accum"])
def test_every_config(compute):
    """One that is not compiled for it, or has no registers for it, fails here."""
    types = Types("f8e4m3fn", "f32", compute)
    found = configs(types)
    assert len(found) > (50 if compute == "f32_fast_accum" else 20)
    for config in found:
        check([make_inputs(types, "NT", CUT)], config)


@needs_hopper
@pytest.mark.parametrize("types", PAIRS)
@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
def test_pairs(types, out):
    computes = ("f32", "f32_fast_accum")
    check([make_inputs(Types(types, out, x), "NT", CUT) for x in computes], COOPERATIVE)


@needs_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [COOPERATIVE, PING_PONG, "64x96x64_c1x1x1_pp_t"])
def test_cases(config, layout):
    types = Types("f8e4m3fn", "bf16", "f32")
    check([make_inputs(types, layout, case) for case in CONFIG_CASES], config)


@needs_hopper
def test_split_k():
    types = Types("f8e4m3fn", "f32", "f32")
    check([make_inputs(types, "NT", Case("long", 264, 136, 4096))], f"{PING_PONG}_split4")


def draw(seed, *shape, dtype="f8e4m3fn"):
    return jax.random.normal(jax.random.key(seed), shape).astype(DTYPES[dtype])


def product(a, b):
    return np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T


def error(got, expected):
    return abs(np.asarray(got).astype(np.float64) - expected).max() / abs(expected).max()


@needs_hopper
@pytest.mark.parametrize("config", [None, COOPERATIVE, PING_PONG, "64x64x64_c1x1x4_pp"])
def test_promoted_sums_are_float32(config):
    """Of positive numbers, whose sums grow: what the tensor core truncates is then lost for good.

    Promoted sums lose a little of each 128 products, others as much of all that was added before,
    again and again.
    """
    a, b = (abs(draw(seed, 256, 16384)) for seed in range(2))
    expected = product(a, b)
    how = {"preferred_element_type": jnp.float32, "implementation": "wgmma"}
    promoted = jax_tcgemm.dot_general(a, b, NT, config=config, **how)
    fast = jax_tcgemm.dot_general(a, b, NT, precision=FAST, **how)
    assert error(promoted, expected) < 2**-8
    assert error(fast, expected) > 4 * error(promoted, expected)


@needs_hopper
def test_selected_by_public_functions():
    """As a model has it: weights of rows of K, and of columns, which are copied."""
    x, w = draw(0, 3, 100, 512), draw(1, 512, 384)
    f = jax.jit(lambda x, w: jax_tcgemm.matmul(x, w, preferred_element_type=jnp.bfloat16))
    assert jax_tcgemm.explain(f, x, w)[0].implementation == "wgmma"
    expected = product(x.reshape(300, 512), w.T).reshape(3, 100, 384)
    assert error(f(x, w), expected) < 2**-8
    y = jax_tcgemm.linear(x, w, jnp.ones(384), preferred_element_type=jnp.float32)
    assert error(y, expected + 1) < 2e-3
    assert jax_tcgemm.matmul(x, w).dtype == jnp.float8_e4m3fn


@needs_hopper
@pytest.mark.parametrize("precision", [None, FAST])
@pytest.mark.parametrize("config", [None, COOPERATIVE, "64x128x64_c2x1x1_pp"])
@pytest.mark.parametrize("shapes", [((), ()), ((300, 1), (384, 1)), ((300, 1), ())])
def test_scaled_matmul(shapes, config, precision):
    x, w = draw(0, 300, 1024), draw(1, 384, 1024, dtype="f8e5m2")
    s, t = (jnp.exp(jax.random.normal(jax.random.key(2 + i), own)) for i, own in enumerate(shapes))
    how = {"precision": precision, "config": config, "preferred_element_type": jnp.bfloat16}
    f = jax.jit(lambda *args: jax_tcgemm.scaled_matmul(*args, implementation="wgmma", **how))
    (one,) = jax_tcgemm.explain(f, x, w, s, t)
    assert one.problem.epilogue.function is not None
    expected = product(x, w) * np.asarray(s, np.float64) * np.asarray(t, np.float64).T
    assert error(f(x, w, s, t), expected) < (2**-6 if precision == FAST else 2**-8)


@needs_hopper
def test_scaled_matmul_by_blocks_and_derivatives():
    x, w = draw(0, 256, 1024), draw(1, 384, 1024)
    s, t = (
        jnp.exp(jax.random.normal(jax.random.key(2 + i), own))
        for i, own in enumerate([(256, 8), (3, 8)])
    )
    wide = [
        np.asarray(a).astype(np.float64)
        * np.repeat(np.repeat(np.asarray(b, np.float64), rows, 0), 128, 1)
        for a, b, rows in ((x, s, 1), (w, t, 128))
    ]
    got = jax_tcgemm.scaled_matmul(x, w, s, t, precision="highest", implementation="xla")
    assert error(got, wide[0] @ wide[1].T) < 1e-5

    s, t = s[:, :1], jnp.ones((384, 1))
    g = jax.random.normal(jax.random.key(5), (256, 384))
    _, vjp = jax.vjp(lambda s: jax_tcgemm.scaled_matmul(x, w, s, t), s)
    expected = (np.asarray(g, np.float64) * product(x, w)).sum(1, keepdims=True)
    assert error(vjp(g)[0], expected) < 2e-3


@needs_hopper
def test_quantized_products():
    """Row by row, as a model is served: a product of two roundings of 4 bits of mantissa."""
    x, w = jax.random.normal(jax.random.key(0), (2, 512, 4096))
    reference = product(x, w)
    x, w = (jax.jit(lambda y: jax_tcgemm.quantize(y, axis=-1))(y) for y in (x, w))
    (x8, s), (w8, t) = ((y.qvalue, y.scale) for y in (x, w))
    y = jax_tcgemm.scaled_matmul(x8, w8, s, t)
    assert np.linalg.norm(np.asarray(y) - reference) < 0.05 * np.linalg.norm(reference)
    exact = product(x8, w8) * np.asarray(s, np.float64) * np.asarray(t, np.float64).T
    assert error(y, exact) < 2e-3
