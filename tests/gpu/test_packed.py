"""Packed weights on a GPU: every config, formats, rows, and what stands around the kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import device
from packed_cases import ROUNDING, Case, configs_of, dequantizes, is_wide

import jax_tcgemm
from jax_tcgemm import PackedWeight
from jax_tcgemm.primitives.packed_weight import rows_of_weight
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.gpu

FORMATS = [
    Case(8, 200, 1536),
    Case(8, 144, 640, 64, "uint4", zeros=True, scale="f32", x="f16"),
    Case(8, 160, 1568, 32, "int8", scale="f16"),
    Case(8, 160, 1568, 32, "int8", x="f16"),
    Case(8, 128, 1536, 128, "uint8", zeros=True),
    Case(8, 272, 768, 64, "int8", zeros=True, x="f16"),
    Case(8, 80, 520, None, "int4", zeros=True),
    Case(8, 128, 1160, None, "uint8", scale="f16"),
    Case(8, 96, 1024, 64, "nf4", scale="f32"),
    Case(8, 400, 512, 32, "nf4", x="f16"),
    Case(8, 16, 8, None, "int4"),
    Case(8, 208, 1088, 32, "float4_e2m1fn", scale="f8e8m0fnu"),
    Case(8, 144, 544, 32, "float4_e2m1fn", scale="f8e8m0fnu", x="f16"),
    Case(8, 272, 1040, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True),
    Case(8, 144, 528, 16, "int4", zeros=True, x="f16"),
    Case(8, 208, 1088, 32, "float8_e4m3fn", scale="f8e8m0fnu"),
    Case(8, 144, 640, 128, "float8_e4m3fn", scale="f32", x="f16"),
    Case(8, 160, 544, 32, "float8_e5m2", scale="f8e8m0fnu"),
    Case(8, 80, 520, None, "float8_e5m2", x="f16"),
]


FLOAT8 = [
    Case(64, 208, 1152, x="f8e4m3fn"),
    Case(65, 144, 1856, 64, "int4", zeros=True, x="f8e4m3fn"),
    Case(130, 144, 928, 32, "uint4", scale="f16", x="f8e4m3fn", out="bf16"),
    Case(100, 136, 1032, None, "uint4", zeros=True, x="f8e4m3fn", out="f16"),
    Case(200, 400, 4096, None, "int4", scale="f32", x="f8e4m3fn"),
    Case(70, 64, 2048, None, "uint4", x="f8e4m3fn", positive=True),
]


def product(case, **how):
    out = {"preferred_element_type": DTYPES[case.out]}
    f = jax.jit(functools.partial(jax_tcgemm.matmul, **out, **how))
    return f(case.lhs, case.weight)


def selected(case, **how):
    """The last call of a product: of packed, or of the dequantized weight."""
    f = functools.partial(jax_tcgemm.matmul, **how)
    return jax_tcgemm.explain(f, case.lhs, case.weight, platform="cuda")[-1]


def check(case, **how):
    rounds = dequantizes(selected(case, **how).config)
    wrong = case.mismatch(product(case, **how), ROUNDING, dequantizes=rounds)
    assert not wrong, wrong


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_every_config(case):
    names = configs_of(case, device())
    assert len(names) >= (9 if device().compute_capability >= 90 else 2)
    # Those of wgmma take every format, but for groups of 16 those that dequantize alone.
    wide = [name for name in names if is_wide(name)]
    most = 17 if case.group == 16 else 30
    assert len(wide) >= (most if device().compute_capability == 90 else 0)
    for config in names:
        check(case, implementation="packed", config=config)


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_weights(case):
    """As arrays they have the bits of what XLA makes of them."""
    rows = jax.jit(
        functools.partial(rows_of_weight, options=CallOptions("test"), dtype=DTYPES[case.x])
    )(case.weight)
    np.testing.assert_array_equal(np.asarray(rows)[: case.n], case.exact_rows)


@pytest.mark.parametrize("rows", [1, 7, 9, 16, 17, 31, 33, 70, 128])
@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4"])
def test_rows(rows, qtype):
    for config in configs_of(Case(rows, 208, 1152, 64, qtype), device()):
        check(Case(rows, 208, 1152, 64, qtype), implementation="packed", config=config)


WIDE = [
    Case(64, 208, 1152),
    Case(65, 144, 1856, 64, "int4", zeros=True),
    Case(128, 272, 4096, 128, "uint4", scale="f32", x="f16"),
    Case(130, 144, 928, 32, "int8", scale="f16"),
    Case(200, 400, 768, 128, "int8", zeros=True, x="f16", out="f16"),
    Case(100, 136, 1032, None, "uint8", zeros=True, x="f16", out="bf16"),
    Case(33, 128, 200, None, "int8", out="bf16"),
    Case(96, 520, 1536, 64, "nf4", scale="f32"),
    Case(300, 1000, 1024, 32, "nf4", x="f16"),
    Case(512, 640, 6144, 32, "uint4", zeros=True, scale="f16"),
    Case(300, 400, 2080, 32, "float4_e2m1fn", scale="f8e8m0fnu"),
    Case(130, 272, 2064, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True),
    Case(300, 400, 2080, 32, "float8_e4m3fn", scale="f8e8m0fnu"),
    Case(130, 272, 1032, None, "float8_e4m3fn", scale="f32", x="f16"),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.label)
def test_many_rows(case):
    """By every config of wgmma, each time with the same bits, and in a graph with others."""
    names = [name for name in configs_of(case, device()) if is_wide(name)]
    assert bool(names) == (device().compute_capability == 90)
    x, w = jnp.asarray(case.x_array), case.weight
    for config in names:
        how = {"implementation": "packed", "config": config}
        f = functools.partial(jax_tcgemm.matmul, preferred_element_type=DTYPES[case.out], **how)
        ys = jax.jit(lambda x, f=f: [f(x * 2.0**-i, w) for i in range(6)])(x)
        wrong = case.mismatch(ys[0], ROUNDING, dequantizes=dequantizes(config))
        assert not wrong, f"{config}: {wrong}"
        np.testing.assert_array_equal(np.asarray(product(case, **how)), np.asarray(ys[0]))
        if case.x == "bf16" and case.out != "f16":
            for i, y in enumerate(ys):
                np.testing.assert_array_equal(np.asarray(y) * 2.0**i, np.asarray(ys[0]))


@pytest.mark.parametrize("case", FLOAT8, ids=lambda case: case.label)
def test_rows_of_8_bits(case):
    """By every config that takes them, each time with the same bits, and what runs by itself."""
    names = configs_of(case, device())
    assert bool(names) == (device().compute_capability == 90)
    for config in names:
        how = {"implementation": "packed", "config": config}
        f = functools.partial(jax_tcgemm.matmul, preferred_element_type=DTYPES[case.out], **how)
        y = jax.jit(f)(case.lhs, case.weight)
        wrong = case.mismatch(y, ROUNDING)
        assert not wrong, f"{config}: {wrong}"
        again = jax.jit(f)(case.lhs, case.weight)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(y))
    for rows in (case.m, 600):
        check(dataclasses.replace(case, m=rows))
    few = dataclasses.replace(case, m=20)
    # Rounded to bfloat16, alike where they are equal.
    wrong = few.mismatch(product(few), 2**-9)
    assert not wrong, wrong


def test_controls_of_rows_of_8_bits_fail():
    """Swapped nibbles, a scale that is a group off, neighbors of x exchanged, scales of rows."""
    case = Case(70, 256, 1024, x="f8e4m3fn")
    w, x = case.weight, case.lhs
    pairs = x.qvalue.reshape(70, -1, 2)[:, :, ::-1].reshape(x.shape)
    for values, scales, rows in (
        (w.values >> 4 | w.values << 4, w.scales, x),
        (w.values, jnp.roll(w.scales, 1, 1), x),
        (w.values, w.scales, dataclasses.replace(x, qvalue=pairs)),
        (w.values, w.scales, dataclasses.replace(x, scale=jnp.roll(x.scale, 1, 0))),
    ):
        wrong = PackedWeight(values, scales, None, None, w.format)
        out = jax_tcgemm.matmul(rows, wrong, preferred_element_type="float32")
        assert case.mismatch(out, ROUNDING)


def test_controls_of_many_rows_fail():
    """Swapped nibbles, a scale that is a group off, and x in another order."""
    case = Case(70, 256, 1024)
    w, x = case.weight, jnp.asarray(case.x_array)
    swapped = x.reshape(70, -1, 2, 2)[:, :, ::-1].reshape(x.shape)
    for values, scales, rows in (
        (w.values >> 4 | w.values << 4, w.scales, x),
        (w.values, jnp.roll(w.scales, 1, 1), x),
        (w.values, w.scales, swapped),
    ):
        wrong = PackedWeight(values, scales, None, None, w.format)
        for config in ("w128x64_c2", "w128x128_m2", "d128x128_c1"):
            if config not in configs_of(case, device()):
                continue
            how = {"implementation": "packed", "config": config}
            out = jax_tcgemm.matmul(rows, wrong, preferred_element_type="float32", **how)
            assert case.mismatch(out, ROUNDING, dequantizes=dequantizes(config))


@pytest.mark.parametrize("out", ["bf16", "f16", "f32"])
def test_results(out):
    check(Case(5, 208, 1152, 64, out=out))


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1000, 4096)])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 100, 300, 600, 2100])
def test_what_runs_by_default(shape, rows):
    case = Case(rows, *shape, out="bf16")
    *_, call = jax_tcgemm.explain(
        jax_tcgemm.matmul, jnp.asarray(case.x_array), case.weight, platform="cuda"
    )
    assert (call.implementation == "packed") == (rows <= 2048)
    if rows <= 256:
        return check(case)
    got = np.asarray(product(case)).astype(np.float64)
    exact, magnitude = case.exact
    assert (abs(got - exact) <= 2**-8 * (abs(exact) + magnitude)).all()


def test_the_same_bits_each_time():
    case = Case(13, 4096, 4096)
    first = np.asarray(product(case))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(product(case)), first)


def test_controls_fail():
    """Swapped nibbles, and a scale that is a group off."""
    case = Case(8, 256, 1024)
    w = case.weight
    for values, scales in (
        (w.values >> 4 | w.values << 4, w.scales),
        (w.values, jnp.roll(w.scales, 1, 1)),
    ):
        wrong = PackedWeight(values, scales, None, None, w.format)
        x = jnp.asarray(case.x_array)
        out = jax_tcgemm.matmul(x, wrong, preferred_element_type="float32")
        assert case.mismatch(out, ROUNDING)


def test_packing_on_the_gpu_is_that_on_the_cpu():
    case = FORMATS[1]
    q, scale, zero_point, _ = case._drawn
    pack = functools.partial(jax_tcgemm.pack_weights, group_size=case.group, dtype=case.qtype)
    with jax.default_device(jax.devices("cpu")[0]):
        there = pack(jnp.asarray(q), jnp.asarray(scale), jnp.asarray(zero_point))
    here = jax.jit(pack)(jnp.asarray(q), jnp.asarray(scale), jnp.asarray(zero_point))
    for ours, theirs in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    for ours, expected in zip(here.unpack(), (q, scale, zero_point), strict=False):
        np.testing.assert_array_equal(np.asarray(ours), expected)


def test_transformations():
    """Many calls in a program, as CUDA graphs have them; rows that are mapped; gradients."""
    case = Case(4, 256, 256, 64, "int4", zeros=True, scale="f32")
    w, x = case.weight, jnp.asarray(case.x_array)
    scaled = case.exact_weight
    f = functools.partial(jax_tcgemm.matmul, preferred_element_type="float32")
    ys = jax.jit(lambda x: [f(x * 2**i, w) for i in range(12)])(x)
    for i, y in enumerate(ys):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(ys[0]) * 2**i)
    mapped = jax.jit(jax.vmap(lambda x: f(x, w)))(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(np.asarray(mapped[0]), np.asarray(ys[0]))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, w: (c, f(x, w)), None, stacked))(x)
    np.testing.assert_array_equal(np.asarray(scanned[1]), np.asarray(ys[0]))
    x_bar = jax.jit(jax.grad(lambda x: f(x, w).sum()))(x)
    expected = np.ones((4, 256)) @ scaled.T
    error = abs(np.asarray(x_bar).astype(np.float64) - expected)
    assert (error <= 2**-7 * (np.ones((4, 256)) @ abs(scaled.T))).all()


def test_layers():
    case = Case(6, 128, 512, 128, scale="f32")
    x, bias = jnp.asarray(case.x_array), jnp.linspace(-1, 1, 128)
    y = jax.jit(lambda x: jax_tcgemm.linear(x, case.weight, bias, activation="relu"))(x)
    exact, magnitude = case.exact
    expected = np.maximum(exact + np.asarray(bias, np.float64), 0)
    assert (
        abs(np.asarray(y).astype(np.float64) - expected) <= 2**-8 * expected + 1e-5 * magnitude
    ).all()


def test_a_forced_kernel_takes_any_number_of_rows():
    check(Case(300, 128, 512), implementation="packed")
