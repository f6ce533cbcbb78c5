"""Packed weights of experts on a GPU: every config, formats, sizes, and what stands around."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import device
from packed_cases import ROUNDING, Case, configs_of, dequantizes, is_wide

import jax_tcgemm
from jax_tcgemm.primitives.packed_weight import rows_of_weight
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.gpu

UNEVEN = (3, 0, 17, 1, 0, 0, 8, 0)
FORMATS = [
    Case(40, 200, 1536, sizes=UNEVEN),
    Case(40, 144, 640, 64, "uint4", zeros=True, scale="f32", x="f16", sizes=UNEVEN),
    Case(40, 160, 1568, 32, "int8", scale="f16", sizes=(8,) * 5),
    Case(70, 128, 1536, 128, "uint8", zeros=True, sizes=(0, 70, 0)),
    Case(33, 80, 520, None, "int4", zeros=True, sizes=(20, 0, 5), offset=1, experts=2),
    Case(33, 128, 1160, None, "uint8", scale="f16", sizes=(1,) * 33),
    Case(40, 96, 1024, 64, "nf4", scale="f32", sizes=UNEVEN),
    Case(20, 400, 512, 32, "nf4", x="f16", sizes=(0, 0, 30)),
    Case(9, 16, 8, None, "int4", sizes=(2, 2)),
    Case(64, 48, 256, 128, "int4", sizes=tuple(int(i % 13 == 0) for i in range(800))),
]


def product(case, **how):
    sizes, offset = map(jnp.asarray, case.groups)
    own = {"preferred_element_type": DTYPES[case.out], "group_offset": offset} | how
    f = jax.jit(functools.partial(jax_tcgemm.ragged_dot, **own))
    return f(case.lhs, case.weight, sizes)


def check(case, **how):
    sizes, offset = map(jnp.asarray, case.groups)
    f = functools.partial(jax_tcgemm.ragged_dot, group_offset=offset, **how)
    call = jax_tcgemm.explain(f, case.lhs, case.weight, sizes, platform="cuda")[-1]
    rounds = dequantizes(call.config)
    wrong = case.mismatch(product(case, **how), ROUNDING, dequantizes=rounds)
    assert not wrong, wrong


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_every_config(case):
    names = configs_of(case, device())
    assert len(names) >= (5 if device().compute_capability >= 90 else 2)
    for config in names:
        check(case, implementation="packed", config=config)


MANY = [
    Case(500, 208, 1536, sizes=(130, 0, 64, 200, 1, 65)),
    Case(400, 144, 640, 64, "uint4", zeros=True, scale="f32", x="f16", sizes=(0, 300, 3, 90)),
    Case(300, 272, 1160, None, "int8", sizes=(100, 100, 70), offset=1, experts=2),
    Case(200, 400, 512, 32, "nf4", out="bf16", sizes=(40,) * 5),
    Case(300, 208, 544, 32, "float4_e2m1fn", scale="f8e8m0fnu", sizes=(130, 0, 64, 1)),
    Case(300, 208, 544, 32, "float8_e4m3fn", scale="f8e8m0fnu", sizes=(130, 0, 64, 1)),
    Case(500, 208, 1536, x="f8e4m3fn", sizes=(130, 0, 64, 200, 1, 65)),
    Case(
        300, 144, 1160, None, "uint4", zeros=True, x="f8e4m3fn", sizes=(9, 99), offset=1, experts=1
    ),
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.label)
def test_many_rows(case):
    names = [name for name in configs_of(case, device()) if is_wide(name)]
    # Those that dequantize in shared memory take x in 16 bits.
    number = 13 if case.has_row_scales else 30
    assert len(names) >= (number if device().compute_capability == 90 else 0)
    for config in names:
        check(case, implementation="packed", config=config)


@pytest.mark.parametrize("case", FORMATS[:4], ids=lambda case: case.label)
def test_weights(case):
    """As arrays they have the bits of what XLA makes of them."""
    rows = jax.jit(
        functools.partial(rows_of_weight, options=CallOptions("test"), dtype=DTYPES[case.x])
    )(case.weight)
    np.testing.assert_array_equal(np.asarray(rows)[:, : case.n], case.exact_rows)


@pytest.mark.parametrize("seed", range(8))
def test_any_sizes(seed):
    """One program for all of them; also fewer tokens and more than there are rows."""
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(rng.integers(0, 260), rng.dirichlet(np.full(16, 0.3)))
    check(Case(200, 208, 1152, 64, sizes=tuple(map(int, sizes))))


@pytest.mark.parametrize("shape", [(16, 2816, 2048), (128, 512, 1024)])
@pytest.mark.parametrize("per_group", [0.1, 2, 8, 40, 140, 270, 2100])
def test_what_runs_by_default(shape, per_group):
    groups, n, k = shape
    rows = max(int(groups * per_group), 1)
    rng = np.random.default_rng(rows)
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, 4.0)))
    case = Case(rows, n, k, out="bf16", sizes=tuple(map(int, sizes)))
    f = functools.partial(jax_tcgemm.ragged_dot, rhs=case.weight, group_sizes=jnp.asarray(sizes))
    *_, call = jax_tcgemm.explain(f, jnp.asarray(case.x_array), platform="cuda")
    assert (call.implementation == "packed") == (per_group <= 2048)
    if per_group <= 2048:
        return check(case)
    got = np.asarray(product(case)).astype(np.float64)
    exact, magnitude = case.exact
    assert (abs(got - exact) <= 2**-8 * (abs(exact) + magnitude)).all()


def test_the_same_bits_each_time_and_beside_others():
    """Those of rows follow their group alone, as long as the number of rows is the same."""
    case = Case(64, 512, 2048, sizes=(9, 0, 30, 25))
    first = np.asarray(product(case))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(product(case)), first)
    other = np.asarray(product(dataclasses.replace(case, sizes=(9, 0, 30, 0))))
    assert not other[39:].any()


def test_controls_fail():
    """The weight of the next group, and a row of the next one."""
    case = FORMATS[0]
    x, (sizes, _) = jnp.asarray(case.x_array), map(jnp.asarray, case.groups)
    rolled = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), case.weight)
    for w, own in ((rolled, sizes), (case.weight, sizes.at[0].add(1))):
        out = jax_tcgemm.ragged_dot(x, w, own, preferred_element_type="float32")
        assert case.mismatch(out, ROUNDING)


def test_transformations():
    """Many calls in a program, as CUDA graphs have them; mapped rows; gradients; layers."""
    case = Case(24, 256, 256, 64, "int4", zeros=True, scale="f32", sizes=(10, 0, 9))
    w, x, sizes = case.weight, jnp.asarray(case.x_array), jnp.asarray(case.groups[0])
    f = functools.partial(jax_tcgemm.ragged_dot, preferred_element_type="float32")
    ys = jax.jit(lambda x, sizes: [f(x * 2**i, w, sizes) for i in range(12)])(x, sizes)
    for i, y in enumerate(ys):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(ys[0]) * 2**i)
    both = jnp.stack([x, 2 * x]), w, jnp.stack([sizes, sizes])
    mapped = jax.jit(jax.vmap(f, (0, None, 0)))(*both)
    np.testing.assert_array_equal(np.asarray(mapped[1]), np.asarray(ys[1]))
    x_bar = jax.jit(jax.grad(lambda x: f(x, w, sizes).sum()))(x)
    of_groups = np.concatenate([np.repeat([0, 2], [10, 9])])
    expected, bound = case.exact_weight.sum(2)[of_groups], abs(case.exact_weight).sum(2)[of_groups]
    got = np.asarray(x_bar).astype(np.float64)
    assert (abs(got[:19] - expected) <= 2**-7 * bound).all()
    assert not got[19:].any()
    bias = jnp.linspace(-1, 1, 3 * 256).reshape(3, 256)
    y = jax.jit(lambda x: jax_tcgemm.ragged_dot(x, w, sizes, bias=bias, activation="relu"))(x)
    exact, magnitude = case.exact
    expected = np.maximum(exact[:19] + np.asarray(bias, np.float64)[of_groups], 0)
    error = abs(np.asarray(y).astype(np.float64)[:19] - expected)
    assert (error <= 2**-8 * expected + 1e-5 * magnitude[:19]).all()
    assert not np.asarray(y)[19:].any()


def test_gated():
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (3, 256, 2, 48))
    scale = rng.uniform(0.01, 0.04, (3, 2, 2, 48)).astype(np.float32)
    w = jax_tcgemm.pack_weights(jnp.asarray(q), jnp.asarray(scale), group_size=128, dtype="int4")
    x = rng.standard_normal((20, 256)).astype(jnp.bfloat16)
    sizes = jnp.array([5, 0, 11])
    y = jax.jit(jax_tcgemm.gated_ragged_linear)(jnp.asarray(x), w, sizes)
    own = np.repeat([0, 2], [5, 11])
    values = q * scale.astype(np.float64).repeat(128, 1)
    wide = x.astype(np.float64)[:16]
    gate, up = (np.einsum("mk,mkn->mn", wide, values[own][:, :, i]) for i in (0, 1))
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(
        np.asarray(y)[:16].astype(np.float64), expected, rtol=1e-2, atol=1e-3
    )
    assert not np.asarray(y)[16:].any()


def test_a_forced_kernel_takes_any_number_of_rows():
    check(Case(700, 128, 512, sizes=(300, 0, 390)), implementation="packed")
