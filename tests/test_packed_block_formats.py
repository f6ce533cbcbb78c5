"""Weights in MXFP4, MXFP8 and NVFP4: products, transformations and fallbacks, against float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_cases import Case, dequantize, unpack
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import pack_weights, stack_packed

BF16 = jnp.bfloat16
MXFP4 = {"group_size": 32, "dtype": "float4_e2m1fn"}
NVFP4 = {"group_size": 16, "dtype": "float4_e2m1fn"}
MXFP8 = {"group_size": 32, "dtype": "float8_e4m3fn"}
BY_NAME = {
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "mxfp8": MXFP8,
    "mxfp8_e5m2": MXFP8 | {"dtype": "float8_e5m2"},
}


def values_of(q, dtype):
    """The numbers in float64 that codes of 4 bits, or floats of 8 bits, stand for."""
    q = np.asarray(q)
    return (q.view(dtype) if dtype == "float4_e2m1fn" else q).astype(np.float64)


def drawn(name, *shape, seed=0):
    """Arguments of `pack_weights` for weights of shape (..., k, n), and the weights in float64."""
    rng = np.random.default_rng([seed, *shape])
    *experts, k, n = shape
    how = BY_NAME[name]
    if how["dtype"] == "float4_e2m1fn":
        q = rng.integers(0, 16, shape).astype(np.uint8)
    else:  # subnormal numbers, too
        q = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, shape)).astype(how["dtype"])
    size = (*experts, k // how["group_size"], n)
    if name != "nvfp4":
        scale = rng.integers(125, 130, size).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        column_scale = None
    else:
        scale = rng.uniform(-4, 4, size).astype(ml_dtypes.float8_e4m3fn)
        column_scale = rng.uniform(0.1, 0.5, experts).astype(np.float32)
    w = values_of(q, how["dtype"])
    w *= scale.astype(np.float64).repeat(how["group_size"], -2)
    if column_scale is not None:
        w *= column_scale.astype(np.float64)[..., None, None]
    arguments = {"q": jnp.asarray(q), "scale": jnp.asarray(scale), "column_scale": column_scale}
    return arguments | how, w


def packed_and_exact(name, *shape, seed=0):
    arguments, w = drawn(name, *shape, seed=seed)
    return pack_weights(**arguments), w


def exact(x):
    return np.asarray(x).astype(np.float64)


def check(got, x, w, f=lambda y: y):
    """Weights and the result are rounded to bfloat16 once each; f has a slope of at most 1.1."""
    x, w = exact(x), exact(w)
    bound = 2.0**-9 * abs(x) @ abs(w) + 2.0**-8 * abs(x @ w)
    assert (abs(exact(got) - f(x @ w)) <= 1.2 * bound + 1e-6).all()


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name", BY_NAME)
def test_dequantized_bit_for_bit(name):
    w, expected = packed_and_exact(name, 96, 40)
    assert (w.shape, w.dtype, w.dequantize().dtype) == ((96, 40), BF16, BF16)
    np.testing.assert_array_equal(dequantize(w, dtype=jnp.float32), expected.astype(np.float32))
    rounded = expected.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(exact(w.dequantize()), exact(rounded))


def test_every_code_and_every_scale():
    """All pairs of a code and a scale that is finite, extreme powers of two included."""
    codes = np.arange(16, dtype=np.uint8).repeat(2)[:, None]
    for dtype, number in (("float8_e8m0fnu", 255), ("float8_e4m3fn", 256)):
        scale = np.arange(number, dtype=np.uint8).view(jnp.dtype(dtype))[None]
        scale = scale[:, np.isfinite(scale[0].astype(np.float32))]
        q = jnp.asarray(np.broadcast_to(codes, (32, scale.shape[1])))
        w = pack_weights(q, jnp.asarray(scale), group_size=None, dtype="float4_e2m1fn")
        expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        with np.errstate(over="ignore"):
            expected = (expected * scale.astype(np.float64)).astype(np.float32)
        got = np.asarray(dequantize(w, dtype=jnp.float32))
        # XLA may flush numbers below the normal ones of float32, of which a scale is 2^-127.
        tiny = np.finfo(np.float32).tiny
        is_normal = (abs(expected) >= tiny) & (scale.astype(np.float64) >= tiny)
        np.testing.assert_array_equal(got[is_normal], expected[is_normal])
        assert (abs(got[~is_normal]) <= abs(expected[~is_normal])).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8(dtype):
    """Every finite number is unpacked and dequantized bit for bit."""
    q = np.arange(256, dtype=np.uint8).view(dtype)
    q = np.where(np.isfinite(q.astype(np.float32)), q, np.zeros((), dtype)).reshape(32, 8)
    scale = jnp.full((1, 8), 2.0**-3, jnp.float8_e8m0fnu)
    w = pack_weights(jnp.asarray(q), scale, group_size=32, dtype=dtype)
    own = unpack(w).q
    assert own.dtype == dtype
    np.testing.assert_array_equal(np.asarray(own).view(np.uint8), q.view(np.uint8))
    got = np.asarray(dequantize(w, dtype=jnp.float32))
    np.testing.assert_array_equal(got, q.astype(np.float32) / 8)


def test_arrays_of_float4():
    codes = np.arange(16, dtype=np.uint8).repeat(2)[:, None] * np.ones((1, 24), np.uint8)
    scale = jnp.ones((1, 24), jnp.float8_e8m0fnu)
    w = pack_weights(jnp.asarray(codes), scale, **MXFP4)
    floats = jnp.asarray(codes.view(ml_dtypes.float4_e2m1fn))
    other = pack_weights(floats, scale, group_size=32, dtype=jnp.float4_e2m1fn)
    assert w.format == other.format
    np.testing.assert_array_equal(w.values, other.values)
    np.testing.assert_array_equal(np.asarray(other.unpack().q), codes)


@pytest.mark.parametrize("shape", ["one", "experts"])
def test_column_scales_of_every_shape(shape):
    """One number, one per column, and, of experts, one each."""
    experts, rng = (3,) * (shape == "experts"), np.random.default_rng(0)
    q = jnp.asarray(rng.integers(-8, 8, (*experts, 32, 2, 24)))
    scale = jnp.asarray(rng.uniform(1, 2, (*experts, 1, 2, 24)), jnp.float32)
    pack = functools.partial(pack_weights, q, scale, group_size=32, dtype="int4")
    plain = exact(pack().dequantize())
    for own in {(), experts, (*experts, 2, 24)}:
        column_scale = rng.uniform(1, 2, own).astype(np.float32)
        whole = column_scale.reshape(*own, *[1] * (len(experts) + 2 - len(own)))
        whole = np.broadcast_to(whole, (*experts, 2, 24))
        w = pack(column_scale=column_scale)
        np.testing.assert_array_equal(np.asarray(w.unpack().column_scale), whole)
        expected = plain * np.expand_dims(whole, len(experts))
        np.testing.assert_allclose(exact(w.dequantize()), expected, rtol=2e-7)
    w = pack(column_scale=0.5)
    np.testing.assert_array_equal(exact(w.dequantize()), plain / 2)


@pytest.mark.parametrize("rows", [1, 5, 300, 520])
@pytest.mark.parametrize("name", BY_NAME)
def test_matmul_and_linear(name, rows):
    w, expected = packed_and_exact(name, 96, 48)
    x, bias = normal(rows, 96).astype(BF16), normal(48, seed=1)
    y = jax.jit(jax_tcgemm.matmul)(x, w)
    assert y.dtype == BF16
    check(y, x, expected)
    y = jax.jit(lambda x: jax_tcgemm.linear(x, w, bias, activation="silu"))(x)
    check(y, x, expected, lambda z: silu(z + exact(bias)))
    y = jax_tcgemm.matmul(x.astype(jnp.float32), w)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(exact(y), exact(x) @ expected, rtol=1e-4, atol=1e-3)
    y = jax_tcgemm.matmul(x.astype(jnp.float16), w)
    assert y.dtype == jnp.float16
    check(y, x, expected)


@pytest.mark.parametrize("name", BY_NAME)
def test_8_bit_rows_are_dequantized(name):
    w, expected = packed_and_exact(name, 96, 48)
    x = jax_tcgemm.quantize(normal(5, 96), block=(1, 96))
    y = jax_tcgemm.matmul(x, w, preferred_element_type=jnp.float32)
    values = (exact(x.qvalue) * exact(x.scale)).astype(np.float32).astype(ml_dtypes.bfloat16)
    check(y, values, expected)


@pytest.mark.parametrize("name", BY_NAME)
def test_gated_linear(name):
    weights = [packed_and_exact(name, 96, 48, seed=seed) for seed in (1, 2)]
    both = stack_packed([w for w, _ in weights], axis=1)
    assert both.shape == (96, 2, 48)
    x = normal(5, 96).astype(BF16) * 0.05
    gate, up = (exact(x) @ w for _, w in weights)
    for w in (both, tuple(w for w, _ in weights)):
        y = jax.jit(jax_tcgemm.gated_linear)(x, w)
        np.testing.assert_allclose(exact(y), silu(gate) * up, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", BY_NAME)
def test_experts(name):
    sizes, rows = jnp.array([5, 0, 6]), normal(13, 96).astype(BF16) * 0.05
    w, expected = packed_and_exact(name, 3, 96, 48)
    y = jax.jit(jax_tcgemm.ragged_dot)(rows, w, sizes)
    check(y[:5], rows[:5], expected[0])
    check(y[5:11], rows[5:11], expected[2])
    assert not exact(y[11:]).any()
    apart = [packed_and_exact(name, 3, 96, 48, seed=seed) for seed in (1, 2)]
    both = stack_packed([w for w, _ in apart], axis=2)
    assert both.shape == (3, 96, 2, 48)
    y = jax.jit(jax_tcgemm.gated_ragged_linear)(rows, both, sizes)
    for own, expert in ((slice(0, 5), 0), (slice(5, 11), 2)):
        gate, up = (exact(rows[own]) @ w[expert] for _, w in apart)
        np.testing.assert_allclose(exact(y[own]), silu(gate) * up, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", BY_NAME)
def test_mapped_and_scanned(name):
    arguments, expected = drawn(name, 3, 64, 40)
    how = BY_NAME[name]
    arrays = {key: x for key, x in arguments.items() if x is not None and key not in how}
    stacked = jax.vmap(lambda arrays: pack_weights(**arrays, **how))(arrays)
    together = pack_weights(**arguments)
    assert stacked.format == together.format
    jax.tree.map(np.testing.assert_array_equal, stacked, together)
    np.testing.assert_array_equal(exact(stacked.dequantize(jnp.float32)), expected.astype("f"))
    x = normal(4, 64).astype(BF16)
    _, ys = jax.lax.scan(lambda _, w: (None, jax_tcgemm.matmul(x, w)), None, stacked)
    zs = jax.vmap(jax_tcgemm.matmul, (None, 0))(x, stacked)
    xs = jnp.stack([x, 2 * x, 3 * x])
    both = jax.jit(jax.vmap(jax_tcgemm.matmul))(xs, stacked)
    rows = jax.vmap(jax_tcgemm.matmul, (0, None))(xs, jax.tree.map(lambda leaf: leaf[1], stacked))
    for i in range(3):
        check(ys[i], x, expected[i])
        check(zs[i], x, expected[i])
        check(both[i], xs[i], expected[i])
        check(rows[i], xs[i], expected[1])


@pytest.mark.parametrize("rows", [6, 600])
@pytest.mark.parametrize("name", BY_NAME)
def test_gradient_of_x(name, rows):
    """Columns that fill up the last tile add nothing to it."""
    w, expected = packed_and_exact(name, 96, 40)
    x, weights = normal(rows, 96).astype(BF16), normal(rows, 40, seed=3)

    def loss(x):
        return jnp.sum(jax_tcgemm.matmul(x, w).astype(jnp.float32) * weights)

    check(jax.jit(jax.grad(loss))(x), weights.astype(BF16), expected.T)

    def of_experts(x, w):
        y = jax_tcgemm.ragged_dot(x, w, jnp.array([rows - 2, 2]))
        return jnp.sum(y.astype(jnp.float32) * weights)

    experts, each = packed_and_exact(name, 2, 96, 40)
    x_bar = jax.jit(jax.grad(of_experts))(x, experts)
    check(x_bar[:-2], weights[:-2].astype(BF16), each[0].T)
    check(x_bar[-2:], weights[-2:].astype(BF16), each[1].T)


def test_stacking_fills_in_column_scales():
    arguments, expected = drawn("nvfp4", 64, 32)
    with_scales = pack_weights(**arguments)
    without = pack_weights(**arguments | {"column_scale": None})
    plain = expected / float(arguments["column_scale"])
    for axis, shape in ((0, (2, 64, 32)), (1, (64, 2, 32))):
        w = stack_packed([without, with_scales], axis)
        assert (w.shape, w.format.has_column_scales) == (shape, True)
        got = exact(dequantize(w, dtype=jnp.float32))
        np.testing.assert_allclose(got, np.stack([plain, expected], axis), rtol=2e-7)
    assert stack_packed([without, without]).column_scales is None
    of_experts = [stack_packed([w, w, w]) for w in (with_scales, without)]
    w = stack_packed(of_experts, axis=2)
    got = exact(dequantize(w, dtype=jnp.float32))
    expected = np.stack([np.stack([x] * 3) for x in (expected, plain)], 2)
    np.testing.assert_allclose(got, expected, rtol=2e-7)
    others = pack_weights(**drawn("mxfp4", 64, 32)[0])
    with pytest.raises(ValueError, match=r"weights must have one format, got weights\[1\]"):
        stack_packed([with_scales, others])


@pytest.mark.parametrize("name", BY_NAME)
def test_row_order(name):
    arguments, _ = drawn(name, 96, 16)
    size = arguments["group_size"]
    g_idx = np.random.default_rng(0).permutation(np.arange(96) // size)
    w = pack_weights(**arguments, g_idx=jnp.asarray(g_idx, jnp.int32))
    expected = values_of(arguments["q"], arguments["dtype"])
    expected = expected * exact(arguments["scale"])[g_idx]
    if arguments["column_scale"] is not None:
        expected = expected * float(arguments["column_scale"])
    np.testing.assert_array_equal(exact(w.dequantize(jnp.float32)), expected.astype(np.float32))
    x = normal(3, 96).astype(BF16)
    check(jax_tcgemm.matmul(x, w), x, expected)


@pytest.mark.parametrize("rows", [8, 600])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(axis_type, rows):
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(axis_type,) * 2)
    w, expected = packed_and_exact("nvfp4", 96, 64)
    x = normal(rows, 96).astype(BF16)
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("j"))), w)
    sharded = jax.device_put(x, NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh):
        y = jax.jit(jax_tcgemm.matmul)(sharded, w)
        x_bar = jax.jit(jax.grad(lambda x: jax_tcgemm.matmul(x, w).sum(dtype=jnp.float32)))(sharded)
    check(y, x, expected)
    check(x_bar, np.ones((rows, 64)), expected.T)


BY_KERNELS = {
    "mxfp4": Case(4, 32, 64, 32, "float4_e2m1fn", scale="f8e8m0fnu"),
    "nvfp4": Case(4, 32, 64, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True),
    "mxfp8": Case(4, 32, 64, 32, "float8_e4m3fn", scale="f8e8m0fnu"),
    "groups of 16": Case(4, 32, 64, 16, "int4"),
    "column scales": Case(4, 32, 64, 32, "int4", columns=True),
}


@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_are_selected(name):
    w = BY_KERNELS[name].weight
    few, many = (jax.ShapeDtypeStruct((rows, 64), BF16) for rows in (4, 6000))

    def calls(f, x):
        return jax_tcgemm.explain(f, x, platform="cuda")

    (call,) = calls(lambda x: jax_tcgemm.matmul(x, w), few)
    assert (call.implementation, call.problem.kind) == ("packed", "packed")
    (call,) = calls(lambda x: jax_tcgemm.linear(x, w, activation="silu"), few)
    assert call.implementation == "packed"
    weight, product = calls(lambda x: jax_tcgemm.matmul(x, w), many)
    assert (weight.implementation, weight.problem.form) == ("packed", "weight")
    assert product.problem.kind == "gemm"
    experts = stack_packed([w, w])
    (call,) = calls(lambda x: jax_tcgemm.ragged_dot(x, experts, jnp.array([2, 2])), few)
    assert (call.implementation, call.problem.form) == ("packed", "grouped")


def test_kernels_that_keep_accumulators_of_a_group_take_no_groups_of_16():
    w = BY_KERNELS["nvfp4"].weight
    x = jax.ShapeDtypeStruct((40, 64), BF16)
    how = {"implementation": "packed", "config": "w128x64_c1"}
    with pytest.raises(ValueError, match="w128x64_c1 has no accumulators for groups of 16 rows"):
        jax_tcgemm.explain(lambda x: jax_tcgemm.matmul(x, w, **how), x, platform="cuda")


def test_the_problem_names_its_arrays():
    problem = BY_KERNELS["nvfp4"].problem
    attributes = problem.attributes()
    assert (attributes["scale"], attributes["column_scales"]) == ("f8e4m3fn", True)
    assert str(problem) == ("4x32x64 bf16 by float4_e2m1fn in groups of 16 with column scales->f32")
    assert problem.bytes == 32 * (64 // 2 + 64 // 16 + 4) + 4 * 64 * 2 + 4 * 32 * 4
