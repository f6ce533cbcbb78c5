"""Packed weights: their format, and products with them against float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_cases import TABLES, Case, dequantize, is_wide
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import PackedWeight, pack_weights
from jax_tcgemm.primitives.encodings.packed import MOST_ROWS
from jax_tcgemm.problem.operands.packed_weight import PackedFormat
from jax_tcgemm.selection import rules
from jax_tcgemm.selection.devices import ASSUMED_GPU
from jax_tcgemm.selection.implementations import configs_of, considered
from jax_tcgemm.system import modules

BF16 = jnp.bfloat16
FORMATS = [
    Case(5, 48, 256, 32, "int4", scale="bf16"),
    Case(5, 40, 192, 64, "uint4", zeros=True, scale="f16", x="f16"),
    Case(5, 16, 256, 128, "int8", scale="f32"),
    Case(5, 72, 384, 128, "uint8", zeros=True, scale="bf16"),
    Case(5, 20, 72, None, "int4", zeros=True, scale="f32"),
    Case(5, 33, 50, None, "int8", scale="f16"),
    Case(5, 64, 128, 64, "nf4", scale="f32"),
    Case(5, 40, 96, 32, "float4_e2m1fn", scale="f8e8m0fnu"),  # MXFP4
    Case(5, 24, 80, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True),  # NVFP4
    Case(5, 40, 80, 16, "uint4", zeros=True, scale="f16", x="f16", columns=True),
    Case(5, 20, 64, 16, "int8", scale="f8e4m3fn"),
]


def exact(x):
    return np.asarray(x).astype(np.float64)


# --- the format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_what_went_in_comes_out(case):
    q, scale, zero_point, _ = case._drawn
    unpacked = jax.jit(PackedWeight.unpack)(case.weight)
    assert unpacked.q.dtype == (jnp.int8 if case.qtype.startswith("int") else jnp.uint8)
    np.testing.assert_array_equal(exact(unpacked.q), q)
    assert unpacked.scale.dtype == scale.dtype
    np.testing.assert_array_equal(exact(unpacked.scale), exact(scale))
    assert unpacked.g_idx is None
    if zero_point is None:
        assert unpacked.zero_point is None
    else:
        np.testing.assert_array_equal(exact(unpacked.zero_point), zero_point)
    assert (unpacked.column_scale is None) == (not case.columns)
    if case.columns:
        np.testing.assert_array_equal(np.asarray(unpacked.column_scale), case.column_scale)
    assert all(x.dtype == jnp.uint8 for x in jax.tree.leaves(case.weight))


@pytest.mark.parametrize("qtype", ["int4", "nf4", "uint8"])
def test_elements_lie_where_the_kernel_reads_them(qtype):
    """By the definition of a chunk, one element after the other."""
    case = Case(1, 32, 128, 32, qtype, zeros=qtype == "uint8", scale="f32", columns=True)
    q, scale, zero_point, _ = case._drawn
    coding = case.coding
    w = jax.tree.map(np.asarray, case.weight)
    for row, column in np.random.default_rng(0).integers(0, (128, 32), (200, 2)):
        chunk, b, c, s, h, e = np.unravel_index(row, (2, 2, 4, 2, 2, 2))
        tile, r, g = np.unravel_index(column, (2, 2, 8))
        lane, pair = 4 * g + c, 2 * h + r
        if coding.bits == 4:
            words = w.values[tile, chunk].view("<u4").reshape(32, 4)
            first = 8 * pair + 4 * e if qtype == "nf4" else 4 * pair + 16 * e
            u = words[lane, 2 * b + s] >> first & 15
        else:
            words = w.values[tile, 2 * chunk + b].view("<u4").reshape(32, 2, 2)
            u = words[lane, s, h] >> 8 * r + 16 * e & 255
        assert u == q[row, column] + coding.offset
        group, place = row // 32, 2 * g + r
        assert w.scales[tile, group].view("<f4")[place] == scale[group, column]
        if zero_point is not None:
            stored = w.zero_points[tile, group].view("<i2")[place]
            assert stored == zero_point[group, column] + coding.offset
        assert w.column_scales[tile, 0].view("<f4")[place] == case.column_scale[column]


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_dequantized(case):
    q, scale, zero_point, _ = case._drawn
    values = q.astype(np.float64)
    if case.qtype in TABLES:
        values = np.array(TABLES[case.qtype], np.float32)[q]
    size = case.group or case.k
    if zero_point is not None:
        values = values - zero_point.repeat(size, 0)
    expected = values.astype(np.float64) * exact(scale).repeat(size, 0)
    if case.columns:
        expected = expected * exact(case.column_scale)
    np.testing.assert_allclose(
        exact(dequantize(case.weight, dtype=jnp.float32)), expected, rtol=2e-7
    )
    narrow = case.weight.dequantize(BF16)
    assert narrow.dtype == BF16
    np.testing.assert_allclose(exact(narrow), expected, rtol=2**-8)


def act_order(k=256, n=32, size=64, seed=0):
    """A weight whose rows are of groups in no order."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-8, 8, (k, n))
    scale = rng.uniform(0.5, 2, (k // size, n)).astype(np.float32)
    g_idx = rng.permutation(k) // size
    w = pack_weights(
        jnp.asarray(q),
        jnp.asarray(scale),
        group_size=size,
        dtype="int4",
        g_idx=jnp.asarray(g_idx, jnp.int32),
    )
    return w, q, scale, g_idx


def test_groups_in_any_order():
    w, q, scale, g_idx = act_order()
    unpacked = w.unpack()
    for got, expected in zip(unpacked, (q, scale, None, g_idx, None), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(np.asarray(got), expected)
    dequantized = q * exact(scale)[g_idx]
    np.testing.assert_allclose(exact(w.dequantize()), dequantized, rtol=2e-7)
    x = normal(3, 256).astype(BF16)
    check(jax_tcgemm.matmul(x, w), exact(x), dequantized)


def test_stacked_weights_are_scanned_and_mapped():
    q = np.random.default_rng(0).integers(-8, 8, (3, 64, 64))
    scale = normal(3, 1, 64, dtype="bfloat16")
    pack = functools.partial(pack_weights, group_size=None, dtype="int4")
    stacked = jax.vmap(pack)(jnp.asarray(q), scale)
    assert stacked.shape == (3, 64, 64)
    np.testing.assert_array_equal(exact(stacked.unpack().q), q)
    dequantized = q * exact(scale)
    np.testing.assert_array_equal(exact(stacked.dequantize(jnp.float32)), dequantized)
    x = normal(4, 64).astype(BF16)
    _, ys = jax.lax.scan(lambda _, w: (None, jax_tcgemm.matmul(x, w)), None, stacked)
    zs = jax.vmap(jax_tcgemm.matmul, (None, 0))(x, stacked)
    xs = jnp.stack([x, 2 * x, 3 * x])
    both = jax.vmap(jax_tcgemm.matmul)(xs, stacked)
    vectors = jax.vmap(jax_tcgemm.matmul)(xs[:, 0], stacked)
    for i in range(3):
        check(ys[i], exact(x), dequantized[i])
        check(zs[i], exact(x), dequantized[i])
        check(both[i], exact(xs[i]), dequantized[i])
        check(vectors[i], exact(xs[i, 0]), dequantized[i])
    (call,) = jax_tcgemm.explain(jax.vmap(jax_tcgemm.matmul), xs, stacked, platform="cuda")
    assert (call.problem.form, call.problem.m, call.problem.experts) == ("grouped", 12, 3)


# --- products -----------------------------------------------------------------------------------


def bound(x, w):
    """Of a bfloat16 product: weights and the result are rounded once each."""
    return 2.0**-9 * abs(x) @ abs(w) + 2.0**-8 * abs(x @ w)


def check(got, x, w, f=lambda y: y):
    """f must have a slope of at most 1.1."""
    error = abs(exact(got).reshape(-1, w.shape[1]) - f(x.reshape(-1, len(w)) @ w))
    assert (error <= 1.2 * bound(x.reshape(-1, len(w)), w) + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 7, 256, 257, 300])
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.label)
def test_matmul(case, rows):
    x = normal(rows, case.k).astype(case.x_array.dtype)
    y = jax.jit(jax_tcgemm.matmul)(x, case.weight)
    assert y.dtype == x.dtype
    # The table's own rounding is one more.
    check(y, exact(x), exact(dequantize(case.weight, dtype=jnp.float32)))


W = Case(1, 96, 256, 128, "int4", scale="f32")


def test_controls_fail():
    """A product of swapped nibbles, of a scale that is a group off, is not within the bound."""
    x, w = normal(16, W.k).astype(BF16), W.weight
    dequantized = exact(dequantize(w))
    values = w.values >> 4 | w.values << 4
    shifted = jnp.roll(w.scales, 1, 1)
    for wrong in (
        PackedWeight(values, w.scales, None, None, w.format),
        PackedWeight(w.values, shifted, None, None, w.format),
    ):
        with pytest.raises(AssertionError):
            check(jax_tcgemm.matmul(x, wrong), exact(x), dequantized)
    check(jax_tcgemm.matmul(x, w), exact(x), dequantized)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("rows", [3, 300])
def test_layers(rows):
    x, bias, skip = normal(rows, W.k).astype(BF16), normal(96, seed=1), normal(rows, 96, seed=2)
    w, residual = exact(dequantize(W.weight)), exact(skip)
    y = jax_tcgemm.linear(x, W.weight, bias, activation="silu", residual=skip, alpha=0.5)
    check(y, exact(x), w, lambda z: silu(z / 2 + exact(bias)) + residual)
    y = jax_tcgemm.matmul(
        x,
        W.weight,
        epilogue=lambda acc, b: (jnp.tanh(acc + b), acc.max(-1)),
        epilogue_operands=(bias,),
    )
    check(y[0], exact(x), w, lambda z: np.tanh(z + exact(bias)))
    assert y[0].dtype == jnp.float32
    assert (abs(exact(y[1]) - (exact(x) @ w).max(-1)) <= bound(exact(x), w).max(-1)).all()


@pytest.mark.parametrize("is_pair", [False, True])
def test_gated(is_pair):
    q = np.random.default_rng(0).integers(-8, 8, (128, 2, 48))
    scale = normal(2, 2, 48) * 0.05
    pack = functools.partial(pack_weights, group_size=64, dtype="int4")
    w = pack(jnp.asarray(q), scale)
    assert w.shape == (128, 2, 48)
    gate, up = np.moveaxis(exact(dequantize(w)), 1, 0)
    if is_pair:
        w = tuple(pack(jnp.asarray(q[:, i]), scale[:, i]) for i in (0, 1))
    x, bias = normal(5, 128).astype(BF16), normal(2, 48, seed=1)
    y = jax_tcgemm.gated_linear(x, w, bias=bias)
    b = exact(bias)
    expected = silu(exact(x) @ gate + b[0]) * (exact(x) @ up + b[1])
    np.testing.assert_allclose(exact(y), expected, rtol=2e-2, atol=2e-2)


def test_einsum_and_dot_general():
    case = Case(1, 60, 128, 64, "int8", scale="f32")
    q, scale, _, _ = case._drawn
    w = pack_weights(
        jnp.asarray(q.reshape(128, 3, 20)), scale.reshape(2, 3, 20), group_size=64, dtype="int8"
    )
    x = normal(2, 5, 128).astype(BF16)
    exact_w = exact(dequantize(w)).reshape(128, 60)
    for subscripts, order in (
        ("bsk,khd->bshd", (0, 1, 2, 3)),
        ("bsk,khd->hbsd", (1, 2, 0, 3)),
    ):
        y = jax_tcgemm.tensor.einsum(subscripts, x, w)
        check(jnp.transpose(y, order), exact(x), exact_w)
        left = jax_tcgemm.tensor.einsum("khd,bsk->" + subscripts[-4:], w, x)
        check(jnp.transpose(left, order), exact(x), exact_w)
    y = jax_tcgemm.dot_general(x, w, (((2,), (0,)), ((), ())), None, jnp.float32)
    check(y, exact(x), exact_w)
    # What no kernel takes: other dimensions contracted, three operands.
    z = jax_tcgemm.tensor.einsum("bshd,khd->bsk", y.astype(BF16), w)
    check(z, exact(y.astype(BF16)).reshape(10, 60), exact_w.T)
    three = jax_tcgemm.tensor.einsum("bsk,khd,h->bsd", x, w, jnp.ones(3, BF16))
    expected = (exact(x) @ exact_w).reshape(2, 5, 3, 20).sum(2)
    np.testing.assert_allclose(exact(three), expected, atol=3e-2 * abs(expected).max())


def test_other_dtypes():
    x, w = normal(4, W.k), exact(dequantize(W.weight))
    y = jax_tcgemm.matmul(x, W.weight)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(exact(y), exact(x) @ w, rtol=1e-4, atol=1e-4)
    y = jax_tcgemm.matmul(x.astype(BF16), W.weight, preferred_element_type="float32")
    assert y.dtype == jnp.float32


# --- transformations ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [6, 300])
def test_derivatives(rows):
    """With respect to x; there are none of the weight."""
    x, w = normal(rows, W.k).astype(BF16), exact(dequantize(W.weight))
    weights = normal(rows, 96, seed=3)

    def loss(x, packed):
        return jnp.sum(jax_tcgemm.matmul(x, packed).astype(jnp.float32) * weights)

    x_bar, w_bar = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, W.weight)
    assert x_bar.dtype == BF16
    g = exact(weights.astype(BF16))
    check(x_bar, g, w.T)
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(w_bar))
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(loss, 1)(x, W.weight)
    y, y_dot = jax.jvp(lambda x: jax_tcgemm.matmul(x, W.weight), (x,), (2 * x,))
    check(y, exact(x), w)
    check(y_dot, exact(2 * x), w)
    # Linear in x: that of its derivative is zero.
    hessian = jax.grad(lambda x: jax.grad(loss)(x, W.weight).astype(jnp.float32).sum())(x)
    assert not np.asarray(hessian).any()


def test_checkpoint_policies_know_the_product():
    x = normal(4, W.k).astype(BF16)

    def f(x):
        return jnp.sin(jax_tcgemm.matmul(x, W.weight).astype(jnp.float32)).sum()

    for policy, kept in (
        (jax_tcgemm.checkpoint_policies.dots_saveable, 0),
        (jax.checkpoint_policies.nothing_saveable, 1),
    ):
        gradient = jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(x)
        assert str(gradient).count("tcgemm_epilogue_product[") == 1 + kept


def test_mapped_rows_are_one_product():
    x = normal(2, 3, 4, W.k).astype(BF16)
    f = jax.vmap(jax.vmap(lambda x: jax_tcgemm.matmul(x, W.weight), 0, 1), 1, 0)
    check(jnp.transpose(f(x), (2, 0, 1, 3)), exact(x), exact(dequantize(W.weight)))
    report = jax_tcgemm.explain(f, x, platform="cuda")
    assert [call.problem.m for call in report] == [24]


def test_what_runs():
    """Few rows on a GPU: the kernel; many: a plain product; on a CPU XLA."""
    few, many = (jax.ShapeDtypeStruct((rows, W.k), BF16) for rows in (MOST_ROWS, MOST_ROWS + 1))
    f = functools.partial(jax_tcgemm.matmul, b=W.weight)
    (call,) = jax_tcgemm.explain(f, few, platform="cuda")
    assert (call.implementation, call.problem.kind) == ("packed", "packed")
    weight, call = jax_tcgemm.explain(f, many, platform="cuda")
    assert (weight.implementation, weight.problem.form) == ("packed", "weight")
    assert (call.problem.kind, call.problem.b.transposed) == ("gemm", True)
    weight, call = jax_tcgemm.explain(f, few, platform="cpu")
    assert (weight.implementation, call.problem.kind) == ("xla", "gemm")
    for found in (weight, call):
        assert found.why.startswith("the weight is dequantized: no other implementation runs on a")
    forced = functools.partial(f, implementation="packed", config="128x2_c4")
    (call,) = jax_tcgemm.explain(forced, many, platform="cuda")
    assert (call.implementation, call.config) == ("packed", "128x2_c4")
    odd = Case(1, 16, 36, None, "int8")
    weight, call = jax_tcgemm.explain(
        lambda x: jax_tcgemm.matmul(x, odd.weight),
        jax.ShapeDtypeStruct((4, 36), BF16),
        platform="cuda",
    )
    assert (weight.implementation, call.problem.kind) == ("xla", "gemm")
    for found in (weight, call):
        assert "k is a multiple of 8, got 36" in found.rejected["packed"]


@pytest.mark.parametrize("rows", [1, 32, 33, 512])
@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336), (6144, 4096)])
def test_kernels_of_many_rows_are_preferred_above_32(shape, rows):
    n, k = shape
    problem = dataclasses.replace(W.problem, m=rows, n=n, k=k, group_size=128)
    found = considered("packed", configs_of("packed", "packed"), problem, ASSUMED_GPU)
    best = min(found, key=functools.partial(rules.packed_us, problem, ASSUMED_GPU.num_sms))
    assert (best.reason, is_wide(best.config)) == ("", rows > 32)


@pytest.mark.parametrize("rows", [1, 40, 200])
def test_estimated_times_select_the_config(rows):
    """The least time of all configs is that of the selected one, which `explain` prints."""
    x = jax.ShapeDtypeStruct((rows, W.problem.k), BF16)
    (call,) = jax_tcgemm.explain(lambda x: jax_tcgemm.matmul(x, W.weight), x, platform="cuda")
    assert call.why.startswith(f"the cost model predicts {call.estimated_us:.4g} us")
    found = considered("packed", configs_of("packed", "packed"), call.problem, ASSUMED_GPU)
    times = [rules.packed_us(call.problem, ASSUMED_GPU.num_sms, x) for x in found if not x.reason]
    assert call.estimated_us == min(times)
    assert call.xla_estimated_us is None


@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(axis_type, rows):
    """Divided along rows and columns, each device has its tiles."""
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(axis_type,) * 2)
    case = Case(1, 128, 256, 64, "int4", zeros=True, scale="bf16")
    x = normal(rows, 256).astype(BF16)
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("j"))), case.weight)
    sharded = jax.device_put(x, NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh):
        y = jax.jit(jax_tcgemm.matmul)(sharded, w)
        x_bar = jax.jit(jax.grad(lambda x: jax_tcgemm.matmul(x, w).sum(dtype=jnp.float32)))(sharded)
    dequantized = exact(dequantize(case.weight, dtype=jnp.float32))
    check(y, exact(x), dequantized)
    assert y.sharding.spec == P("i", "j")
    check(x_bar, np.ones((rows, 128)), dequantized.T)


def test_lowered_for_a_gpu():
    """The call that a GPU gets, with its attributes and operands, and the kernel it carries."""
    case = Case(3, 128, 256, 64, "uint4", zeros=True, scale="bf16")
    x = jax.ShapeDtypeStruct((3, 256), BF16)
    f = jax.jit(lambda x: jax_tcgemm.matmul(x, case.weight))
    text = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "tcgemm_packed" in text
    assert "zero_points = true" in text
    assert "tcgemm::packed::kernel<" in text


def test_many_rows_lowered_for_a_gpu():
    """With the kernel of wgmma, and room for x in the order of the weight: whole chunks of k."""
    case = Case(70, 128, 264, None, "int4")
    x = jax.ShapeDtypeStruct((70, 264), BF16)
    how = {"implementation": "packed", "config": "w128x64_m2"}
    f = jax.jit(lambda x: jax_tcgemm.matmul(x, case.weight, **how))
    text = f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert (
        "tcgemm::packed::wide_kernel<tcgemm::packed::WideConfig<128, 64, 1, 2, false, false>"
        in text
    )
    assert f"tensor<{70 * 320 * 2}xui8>" in text


# --- refusals -----------------------------------------------------------------------------------

Q, SCALE = jnp.zeros((64, 32), jnp.int8), jnp.ones((2, 32))
PACKED = pack_weights(Q, SCALE, group_size=32, dtype="int4")
X = jnp.ones((4, 64), BF16)


def packing(q=Q, scale=SCALE, zero_point=None, group_size=32, dtype="int4", **how):
    return lambda: pack_weights(q, scale, zero_point, group_size=group_size, dtype=dtype, **how)


def other(**fields):
    form = PackedFormat(**{**vars(PACKED.format), **fields})
    return PackedWeight(PACKED.values, PACKED.scales, None, None, form)


REFUSALS = {
    "a group that does not divide": (packing(Q[:48]), "group_size must divide .*, got group_"),
    "another group": (packing(group_size=48), "group_size must be 16, 32, 64, 128, or None"),
    "a group of no number": (packing(group_size="all"), "group_size must be an integer or None"),
    "out of range": (packing(Q + 8), "q must be from -8 to 7 for dtype='int4', got numbers"),
    "below the range": (packing(Q - 1, dtype="uint4"), "q must be from 0 to 15"),
    "negative but for its dtype": (packing((Q - 1).astype(jnp.uint32)), "q must be from -8 to 7"),
    "NaN": (packing(scale=SCALE.at[1, 3].set(jnp.nan)), "scale must be finite, got"),
    "infinity": (packing(scale=SCALE.at[0, 0].set(jnp.inf)), "scale must be finite, got"),
    "scales of another shape": (
        packing(scale=SCALE[:1]),
        r"scale must have one .* got .*\(1, 32\)",
    ),
    "scales of float64": (packing(scale=SCALE.astype(jnp.int8)), "scale must be of bfloat16"),
    "a zero point out of range": (
        packing(zero_point=jnp.full((2, 32), 9)),
        "zero_point must be from -8 to 8",
    ),
    "zero points with fractions": (packing(zero_point=SCALE), "zero_point must be None or int"),
    "zero points of a table": (
        packing(dtype="nf4", zero_point=jnp.zeros((2, 32), jnp.int8)),
        "zero_point must be None or integers of the shape of scale, and None for tables and",
    ),
    "fractions": (packing(SCALE), "q must be integers, got q.dtype=float32"),
    "integers as 8-bit floats": (
        packing(dtype="float8_e4m3fn"),
        "q must be of float8_e4m3fn, got q.dtype=int8; convert it, or bitcast its bits",
    ),
    "8-bit floats of another dtype": (
        packing(Q.astype(jnp.float8_e5m2), dtype="float8_e4m3fn"),
        "q must be of float8_e4m3fn, got q.dtype=float8_e5m2",
    ),
    "8-bit floats as integers": (
        packing(Q.astype(jnp.float8_e4m3fn), dtype="int8"),
        "q must be integers, got q.dtype=float8_e4m3fn",
    ),
    "a NaN among 8-bit floats": (
        packing((Q * jnp.nan).astype(jnp.float8_e4m3fn), dtype="float8_e4m3fn"),
        "q must be finite, got q with NaN or infinity",
    ),
    "an infinity among 8-bit floats": (
        packing((Q + jnp.inf).astype(jnp.float8_e5m2), dtype="float8_e5m2"),
        "q must be finite, got q with NaN or infinity",
    ),
    "zero points of 8-bit floats": (
        packing(
            Q.astype(jnp.float8_e5m2), dtype="float8_e5m2", zero_point=jnp.zeros((2, 32), jnp.int8)
        ),
        "zero_point must be None or integers of the shape of scale, and None for tables and",
    ),
    "a vector": (packing(Q[0]), "q must have two dimensions at least"),
    "another dtype": (
        packing(dtype="int2"),
        "dtype must be int4, uint4, int8, uint8, float8_e4m3fn, float8_e5m2, nf4, float4_e2m1fn",
    ),
    "a code of 5 bits": (packing(Q + 16, dtype="float4_e2m1fn"), "q must be from 0 to 15"),
    "4-bit floats as integers": (
        packing(Q.astype(jnp.float4_e2m1fn)),
        "q must be integers, got q.dtype=float4_e2m1fn",
    ),
    "a power of two that is NaN": (
        packing(scale=(SCALE * jnp.nan).astype(jnp.float8_e8m0fnu)),
        "scale must be finite, got",
    ),
    "scales of other 8-bit floats": (
        packing(scale=SCALE.astype(jnp.float8_e5m2)),
        "scale must be of .*float8_e8m0fnu, float8_e4m3fn, got scale.dtype=float8_e5m2",
    ),
    "column scales that are integers": (
        packing(column_scale=3),
        "column_scale must be of a real floating-point dtype",
    ),
    "column scales that are infinite": (
        packing(column_scale=jnp.inf),
        "column_scale must be finite, got column_scale with NaN or infinity",
    ),
    "column scales of another shape": (
        packing(column_scale=jnp.ones(31)),
        r"column_scale must be one number, or have one for each column, \(32,\), got .*\(31,\)",
    ),
    "column scales of no expert": (
        packing(jnp.stack([Q] * 3), jnp.stack([SCALE] * 3), column_scale=jnp.ones(2)),
        r"for each column, \(3, 32\), or for each expert, \(3,\), got column_scale.shape=\(2,\)",
    ),
    "column scales that the format lacks": (
        lambda: jax_tcgemm.matmul(X, dataclasses.replace(PACKED, column_scales=PACKED.scales)),
        "^matmul: b.column_scales must be None where b.format.has_column_scales is False",
    ),
    "column scales that the weight lacks": (
        lambda: jax_tcgemm.matmul(X, other(has_column_scales=True)),
        r"^matmul: b.column_scales must be uint8 of shape \(2, 1, 64\), got NoneType",
    ),
    "a short table": (packing(dtype=np.ones(8)), "dtype must be int4"),
    "groups of other sizes": (
        packing(g_idx=jnp.zeros(64, jnp.int32)),
        "g_idx must name each of 2 groups 32 times",
    ),
    "a g_idx too short": (packing(g_idx=jnp.zeros(3, jnp.int32)), "g_idx must be an integer for"),
    "another version": (
        lambda: jax_tcgemm.matmul(X, other(version=2)),
        "^matmul: b must be packed by version 1 of the format, got b.format.version=2; pack it",
    ),
    "a blob of another shape": (
        lambda: jax_tcgemm.linear(X, other(shape=(64, 48))),
        r"^linear: w.values must be uint8 of shape \(3, 1, 512\), got uint8 of shape \(2, 1, 512\)",
    ),
    "a blob of floats": (
        lambda: jax_tcgemm.linear(X, jax.tree.map(jnp.float32, PACKED)),
        "^linear: w.values must be uint8 of shape .*, got float32",
    ),
    "stacked weights": (
        lambda: jax_tcgemm.linear(X, jax.tree.map(lambda x: jnp.stack([x, x]), PACKED)),
        "^linear: w must be one weight, got w.shape=",
    ),
    "x of another length": (
        lambda: jax_tcgemm.linear(X[:, 1:], PACKED),
        "^linear: the last dimension of x must equal the first of w",
    ),
    "x of integers": (
        lambda: jax_tcgemm.matmul(X.astype(jnp.int8), PACKED),
        "^matmul: what is multiplied by a packed weight must be .*, got int8; convert",
    ),
    "x of 8 bits": (
        lambda: jax_tcgemm.linear(X.astype(jnp.float8_e4m3fn), PACKED),
        "^linear: what is multiplied by a packed weight must be .*, got float8_e4m3fn; convert",
    ),
    "two weights": (
        lambda: jax_tcgemm.tensor.einsum("ki,kj->ij", PACKED, PACKED),
        "^tensor.einsum: what is multiplied by a packed weight must be .*, got another one; ",
    ),
    "a weight on the left": (lambda: jax_tcgemm.matmul(PACKED, X), "^matmul: a must be an array"),
    "a batch of products": (
        lambda: jax_tcgemm.matmul(
            X, pack_weights(Q[:, None], SCALE[:, None], group_size=32, dtype="int4")
        ),
        "^matmul: b must be a matrix where it is a packed weight",
    ),
    "another implementation": (
        lambda: jax_tcgemm.matmul(X, PACKED, implementation="wgmma"),
        "^matmul: implementation must be one of packed, xla, got implementation='wgmma'",
    ),
    "a GPU's here": (
        lambda: jax_tcgemm.matmul(X, PACKED, implementation="packed"),
        "^matmul: implementation must be able to run the product, got .* it runs on cuda",
    ),
    "another config": (
        lambda: jax_tcgemm.matmul(X, PACKED, implementation="packed", config="big"),
        "^matmul: config must be one of 128x2_c1",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    call, says = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=says):
        call()


@pytest.mark.skipif(modules.cuda is None, reason="this build has no CUDA module")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 40}, "n must be a multiple of 16, got 40"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"group_size": 48}, "group_size must divide k, got 48"),
        ({"group_size": 0}, "group_size must divide k, got 0"),
        ({"bits": 3}, "bits must be 4 or 8, got 3"),
        ({"zero": 17}, "zero must be from 0 to 2^bits, got 17"),
        ({"zero_points": True}, "zero must be 0 beside zero points, got 8"),
        ({"code": "table"}, "integers alone have zeros"),
        ({"code": "float8_e5m2", "zero": 0}, "bits must be 8 of float8_e5m2, got 4"),
        ({"code": "float4_e2m1fn", "zero": 0, "bits": 8}, "bits must be 4 of float4_e2m1fn, got 8"),
        ({"code": "float6"}, "code must be integer, table, float4_e2m1fn, float8_e4m3fn or"),
        ({"scale": "f64"}, "scale must be f16, bf16, f32, f8e4m3fn or f8e8m0fnu, got f64"),
        ({"in_dtype": "f32"}, "x must be f16, bf16 or f8e4m3fn, got f32"),
        ({"in_dtype": "f8e4m3fn"}, "rows must have scales where x is f8e4m3fn, and nowhere else"),
        ({"row_scales": True}, "rows must have scales where x is f8e4m3fn, and nowhere else"),
        (
            {"in_dtype": "f8e4m3fn", "row_scales": True, "bits": 8},
            "x must be f16 or bf16 unless the weight has integers of 4 bits, got f8e4m3fn",
        ),
        ({"out_dtype": "s32"}, "d must be f16, bf16 or f32, got s32"),
        ({"form": "weight"}, "m must be 0 of a weight, got 1"),
        ({"experts": 2}, "experts and num_sizes must be 1 and 0 where there are no groups of rows"),
        ({"form": "grouped"}, "experts must be from 1 to num_sizes=0, got 1"),
        ({"form": "grouped", "experts": 0, "num_sizes": 3}, "must be from 1 to num_sizes=3, got 0"),
        ({"form": "both"}, "form must be product, weight or grouped, got both"),
    ],
    ids=str,
)
def test_problems_are_checked_again(change, says):
    """Before a kernel is chosen, and by the same code in each call."""
    query = Case(1, 32, 256, 64).problem.query() | change
    with pytest.raises(ValueError, match=re.escape(says)):
        modules.cuda.packed.reject("packed", "128x2_c1", query, ASSUMED_GPU.query())


def test_what_a_config_cannot_run():
    def reason(config, case, device=ASSUMED_GPU):
        (candidate,) = considered("packed", (config,), case.problem, device)
        return candidate.reason

    many_registers = Case(32, 32, 256, 64, zeros=True)
    assert "lacks registers for more than 16 rows of x" in reason("256x2_c1", many_registers)
    assert reason("128x2_c1", many_registers) == ""
    small_groups = Case(32, 32, 256, group=16)
    assert "groups of fewer than 128 rows" in reason("256x2_c1", small_groups)
    ampere = dataclasses.replace(ASSUMED_GPU, compute_capability=80, shared_memory_bytes=166912)
    assert "has clusters, which begin with compute" in reason("128x2_c2", W, ampere)
    assert reason("128x2_c1", W, ampere) == ""
    assert "is of wgmma: the device must have compute" in reason("w128x64_c1", W, ampere)
    assert reason("w128x64_c1", W) == ""
    many_rows = dataclasses.replace(W.problem, m=2**31 - 1, k=2**31 - 64, group_size=2**31 - 64)
    (candidate,) = considered("packed", ("w128x64_c1",), many_rows, ASSUMED_GPU)
    assert "would copy x by more than 2^31 - 1 blocks" in candidate.reason
    turing = dataclasses.replace(ampere, compute_capability=75)
    assert "must have compute capability 8.0 or later" in reason("128x2_c1", W, turing)
