"""ragged_dot and ragged_dot_general: values, gradients and transformations."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.errors import JaxRuntimeError
from jax.test_util import check_grads
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.problem.function import NO_FUNCTION, Numbers
from jax_tcgemm.problem.gemm import numbers_of
from jax_tcgemm.system import modules

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["host", "xla"])

# Bound of the error of one rounded product and sum of k terms of order 1, over sqrt(k).
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-14}


def assert_close(got, expected, k, dtype="float32", factor=1.0):
    tolerance = factor * TOLERANCES[dtype] * np.sqrt(max(k, 1))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance
    )


@st.composite
def ragged_cases(draw):
    """Extents and group sizes: empty groups, single rows, all in one, sums above and below m.

    Extents are of few kinds, each of which is compiled once; sizes are not compiled at all.
    """
    m, k, n, groups = draw(
        st.sampled_from([(70, 40, 33, 9), (1, 7, 16, 2), (32, 0, 8, 3), (0, 5, 4, 1)])
    )
    size = st.sampled_from([0, 0, 1, 2, 7, 16, m]) | st.integers(0, 20)
    sizes = draw(st.lists(size, min_size=groups, max_size=groups))
    return m, k, n, sizes


@jax.jit
def value_and_cotangents(lhs, rhs, sizes, ct):
    out, vjp = jax.vjp(lambda *operands: jax_tcgemm.ragged_dot(*operands, sizes), lhs, rhs)
    return out, *vjp(ct)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@given(case=ragged_cases(), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_values_and_gradients(dtype, case, seed):
    m, k, n, sizes = case
    rng = np.random.default_rng(seed)
    lhs, rhs, ct = (
        rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for shape in ((m, k), (len(sizes), k, n), (m, n))
    )
    with jax.enable_x64(dtype == "float64"):
        out, lhs_bar, rhs_bar = value_and_cotangents(lhs, rhs, np.array(sizes, np.int32), ct)
    assert (out.dtype, lhs_bar.dtype, rhs_bar.dtype) == (lhs.dtype,) * 3
    assert_close(out, reference.rows(lhs, rhs, sizes), k, dtype)
    assert_close(lhs_bar, reference.rows(ct, np.swapaxes(rhs, 1, 2), sizes), n, dtype)
    assert_close(rhs_bar, reference.contraction(lhs, ct, sizes), m, dtype)


@pytest.mark.parametrize(
    ("sizes_dtype", "last"),
    [("int32", 200), ("int64", 2**40), ("uint32", 2**32 - 1), ("uint8", 200), ("int8", 5)],
)
@IMPLEMENTATIONS
def test_sizes_of_any_integer_type(implementation, sizes_dtype, last, x64):
    sizes = [3, 0, last]
    lhs, rhs = normal(10, 4), normal(3, 4, 5, seed=1)
    got = jax_tcgemm.ragged_dot(
        lhs, rhs, jnp.array(sizes, sizes_dtype), implementation=implementation
    )
    assert_close(got, reference.rows(lhs, rhs, sizes), 4)


@pytest.mark.parametrize("dtype", ["int8", "complex64"])
def test_other_dtypes_match_lax(dtype):
    # As int8 what is left of the decimals.
    scale, preferred = (40, jnp.int32) if dtype == "int8" else (1, None)
    lhs, rhs = (
        jnp.asarray((scale * np.asarray(normal(*shape))).astype(dtype))
        for shape in ((9, 6), (2, 6, 5))
    )
    args = (lhs, rhs, jnp.array([4, 3]))
    ours, theirs = (
        f(*args, preferred_element_type=preferred) for f in (jax_tcgemm.ragged_dot, lax.ragged_dot)
    )
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_row_and_group():
    """Rows of NaN and inf, in one group and past the last one, and a matrix of them."""
    sizes, spoilt = [5, 0, 6, 4], 2
    operands = [
        np.asarray(x) for x in (normal(17, 8), normal(4, 8, 3, seed=1), normal(17, 3, seed=2))
    ]
    bad_lhs, bad_rhs, bad_ct = (x.copy() for x in operands)
    bad_lhs[5:11], bad_lhs[15:], bad_rhs[spoilt] = np.nan, np.inf, np.nan
    bad_ct[5:11], bad_ct[15:] = [np.nan, np.inf, np.nan], np.nan
    group_sizes, clean = np.array(sizes, np.int32), np.r_[0:5, 11:17]

    def run(lhs, rhs, ct):
        return jax.device_get(value_and_cotangents(lhs, rhs, group_sizes, ct))

    out, lhs_bar, rhs_bar = run(bad_lhs, bad_rhs, bad_ct)
    expected, expected_lhs_bar, expected_rhs_bar = run(*operands)
    np.testing.assert_array_equal(out[clean], expected[clean])
    np.testing.assert_array_equal(out[15:], 0)
    np.testing.assert_array_equal(lhs_bar[clean], expected_lhs_bar[clean])
    for g in (0, 1, 3):
        np.testing.assert_array_equal(rhs_bar[g], expected_rhs_bar[g])
    np.testing.assert_array_equal(rhs_bar[1], 0)
    assert np.isnan(out[5:11]).all()
    assert np.isnan(rhs_bar[spoilt]).any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("offset", [0, 1, 3, 5, 7, 2**31 - 1, -1, -(2**31)])
def test_group_offset_selects_groups(implementation, offset):
    """Of five groups the two from `offset` on, which may reach past the last or begin before 0."""
    sizes = jnp.array([3, 2, 0, 6, 4])
    lhs, rhs, ct = normal(18, 5), normal(2, 5, 4, seed=1), normal(18, 4, seed=2)
    f = functools.partial(
        jax_tcgemm.ragged_dot,
        group_sizes=sizes,
        group_offset=jnp.array([offset]),
        implementation=implementation,
    )
    out, vjp = jax.vjp(f, lhs, rhs)
    lhs_bar, rhs_bar = vjp(ct)
    offset = max(offset, 0)
    assert_close(out, reference.rows(lhs, rhs, sizes, offset), 5)
    assert_close(lhs_bar, reference.rows(ct, np.swapaxes(rhs, 1, 2), sizes, offset), 4)
    assert_close(rhs_bar, reference.contraction(lhs, ct, sizes, offset, 2), 18)
    np.testing.assert_array_equal(out, jax.jit(f)(lhs, rhs))


def test_sizes_past_the_last_row_are_cut():
    lhs, rhs = normal(10, 4), normal(3, 4, 5, seed=1)
    for sizes in ([4, 20, 3], [2**31 - 1] * 3, [-5, 4, 3], [0, 0, 0]):
        for implementation in ("host", "xla"):
            got = jax_tcgemm.ragged_dot(
                lhs, rhs, jnp.array(sizes, jnp.int32), implementation=implementation
            )
            assert_close(got, reference.rows(lhs, rhs, sizes), 4)


def test_sizes_do_not_overflow_where_a_token_has_more_than_one_row():
    """A free dimension after the ragged one: its indices are rows of the same token."""
    lhs, rhs = normal(50, 3, 4), normal(2, 4, 5, seed=1)
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (0,), (0,))
    expected = reference.rows(lhs.reshape(150, 4), rhs, [60, 90]).reshape(50, 3, 5)
    for sizes in (np.array([20, 100], np.int8), np.array([20, 2**31 - 1], np.int32)):
        got = jax_tcgemm.ragged_dot_general(lhs, rhs, sizes, numbers)
        assert_close(got, expected, 4)


# --- transformations ----------------------------------------------------------------------------


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "mapped",
    [*itertools.product([True, False], repeat=3)][:-1],
    ids=lambda m: "".join("ny"[x] for x in m),
)
def test_vmap_of_values_and_gradients(mapped, implementation):
    """Over any of lhs, rhs and sizes, along any of their dimensions."""
    axes = [axis if is_mapped else None for axis, is_mapped in zip((1, 3, 0), mapped, strict=True)]
    sizes = np.array([[3, 0, 4], [1, 1, 5], [7, 0, 0]], np.int32)[: 3 if mapped[2] else 1]
    lhs, rhs = np.asarray(normal(3, 8, 5)), np.asarray(normal(3, 3, 5, 4, seed=1))
    operands = [
        np.moveaxis(x, 0, axis) if axis is not None else x[0]
        for x, axis in zip((lhs, rhs, sizes), axes, strict=True)
    ]

    def f(lhs, rhs, sizes):
        run = functools.partial(
            jax_tcgemm.ragged_dot, group_sizes=sizes, implementation=implementation
        )
        return run(lhs, rhs), jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1))(lhs, rhs)

    got = jax.device_get(jax.jit(jax.vmap(f, axes))(*operands))
    alone = jax.jit(f)
    for i in range(3):
        entry = [
            x[i if is_mapped else 0] for x, is_mapped in zip((lhs, rhs, sizes), mapped, strict=True)
        ]
        for ours, one in zip(jax.tree.leaves(got), jax.tree.leaves(alone(*entry)), strict=True):
            np.testing.assert_allclose(ours[i], one, rtol=1e-5, atol=1e-5)


def test_nested_vmap_is_one_call():
    lhs, rhs = np.asarray(normal(2, 3, 8, 5)), np.asarray(normal(2, 4, 5, 6, seed=1))
    sizes = np.array([[1, 2, 0, 5], [4, 0, 4, 0], [2, 2, 2, 1]], np.int32)
    f = jax.vmap(jax.vmap(jax_tcgemm.ragged_dot, (0, None, 0)), (0, 0, None))
    got = np.asarray(jax.jit(f)(lhs, rhs, sizes))
    for i, j in itertools.product(range(2), range(3)):
        assert_close(got[i, j], reference.rows(lhs[i, j], rhs[i], sizes[j]), 5)
    hlo = jax.jit(f).lower(lhs, rhs, sizes).as_text()
    assert hlo.count("@tcgemm_ragged(") == 1


def test_gradient_through_a_batch_with_shared_weights():
    """The batch dimension of size 1 that vmap makes is summed over again."""
    lhs, rhs, sizes = normal(3, 8, 5), normal(2, 5, 4, seed=1), jnp.array([5, 2])

    def loss(f, lhs, rhs):
        return jnp.sum(jnp.sin(jax.vmap(f, (0, None, None))(lhs, rhs, sizes)))

    got = jax.jit(jax.grad(functools.partial(loss, jax_tcgemm.ragged_dot), (0, 1)))(lhs, rhs)
    alone = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(lax.ragged_dot(a, b, sizes))), (0, 1)))
    one = [jax.device_get(alone(x, rhs)) for x in np.asarray(lhs)]
    np.testing.assert_allclose(got[0], np.stack([a for a, _ in one]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], sum(b for _, b in one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda a, b: jax.jvp(f, (a, b), (jnp.cos(a), jnp.sin(b))),
        lambda f: jax.grad(lambda a, b: jnp.sum(f(a, b) ** 3), (0, 1)),
        lambda f: lambda a, b: jax.linearize(f, a, b)[1](jnp.cos(a), jnp.sin(b)),
        lambda f: lambda a, b: jax.linear_transpose(lambda x: f(x, b), a)(f(a, b))[0],
        lambda f: lambda a, b: jax.linear_transpose(lambda x: f(a, x), b)(f(a, b))[0],
        lambda f: jax.grad(jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(f(a, b)))), (0, 1)),
    ],
    ids=["jvp", "grad", "linearize", "transpose lhs", "transpose rhs", "remat"],
)
def test_derivatives_match_lax(transform):
    sizes = jnp.array([4, 0, 3])
    lhs, rhs = normal(9, 5), normal(3, 5, 4, seed=1)
    ours = jax.jit(transform(lambda a, b: jax_tcgemm.ragged_dot(a, b, sizes)))
    theirs = jax.jit(transform(lambda a, b: lax.ragged_dot(a, b, sizes)))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        ours(lhs, rhs),
        theirs(lhs, rhs),
    )
    assert " ragged_dot_general[" not in str(jax.make_jaxpr(ours)(lhs, rhs))


@IMPLEMENTATIONS
def test_hessian(implementation):
    """Which lax.ragged_dot cannot: against that of the dense product under a mask."""
    sizes = np.array([2, 0, 3], np.int32)
    lhs, rhs = normal(6, 3), normal(3, 3, 2, seed=1)
    ends = np.cumsum(sizes)
    rows = np.arange(6)[None]
    mask = (rows < ends[:, None]) & (rows >= (ends - sizes)[:, None])

    def loss(f):
        return lambda a, b: jnp.sum(jnp.sin(f(a, b)))

    ours = functools.partial(
        jax_tcgemm.ragged_dot, group_sizes=sizes, implementation=implementation
    )
    got = jax.jit(jax.hessian(loss(ours), (0, 1)))(lhs, rhs)
    dense = loss(lambda a, b: jnp.einsum("gm,mk,gkn->mn", mask.astype(a.dtype), a, b))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        got,
        jax.jit(jax.hessian(dense, (0, 1)))(lhs, rhs),
    )


def test_scan_over_layers_and_one_program_for_any_sizes():
    weights = normal(4, 3, 6, 6, seed=1)

    @jax.jit
    def network(x, weights, sizes):
        step = lambda x, w: (jnp.tanh(jax_tcgemm.ragged_dot(x, w, sizes)), None)  # noqa: E731
        return lax.scan(step, x, weights)[0]

    x, matrices = normal(10, 6), np.asarray(weights)
    for sizes in ([4, 2, 4], [0, 10, 0], [1, 1, 1]):
        expected = np.asarray(x, np.float64)
        for w in matrices:
            expected = np.tanh(reference.rows(expected, w, sizes))
        assert_close(network(x, weights, jnp.array(sizes)), expected, 6, factor=4)
    assert network._cache_size() == 1


def test_expert_parallelism(run_python):
    """Four devices with two experts each; a psum of their parts. Both gradients too."""
    code = """
import jax, jax.numpy as jnp, numpy as np, jax_tcgemm
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("experts",), axis_types=(AxisType.Auto,))
x = jax.random.normal(jax.random.key(0), (20, 6))
w = jax.random.normal(jax.random.key(1), (8, 6, 5))
sizes = jnp.array([3, 0, 4, 1, 0, 5, 2, 2])

def local(x, w, sizes):
    offset = 2 * jax.lax.axis_index("experts")
    out = jax_tcgemm.ragged_dot(x, w, sizes, group_offset=offset, implementation="host")
    return jax.lax.psum(out, "experts")

f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("experts"), P()), out_specs=P())
loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w, sizes)))
whole = jax.lax.ragged_dot
np.testing.assert_allclose(jax.jit(f)(x, w, sizes), whole(x, w, sizes), rtol=1e-5, atol=1e-5)
got = jax.jit(jax.grad(loss(f), (0, 1)))(x, w)
for g, e in zip(got, jax.grad(loss(whole), (0, 1))(x, w)):
    np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)
hlo = jax.jit(f).lower(x, w, sizes).compile().as_text()
print("ours" if "tcgemm_ragged" in hlo and "all-gather" not in hlo else hlo)
"""
    flags = "--xla_force_host_platform_device_count=4"
    assert run_python(code, XLA_FLAGS=flags).strip() == "ours"


# --- ragged_dot_general -------------------------------------------------------------------------


def numbers(contract, batch, ragged, group=()):
    return lax.RaggedDotDimensionNumbers((contract, batch), (ragged,), group)


GENERAL_CASES = {
    # lhs shape, rhs shape, sizes shape, dimension numbers
    "rows": ((10, 5), (3, 5, 4), (3,), numbers(((1,), (1,)), ((), ()), 0, (0,))),
    "rhs transposed": ((10, 5), (3, 4, 5), (3,), numbers(((1,), (2,)), ((), ()), 0, (0,))),
    "lhs transposed": ((5, 10), (5, 3, 4), (3,), numbers(((0,), (0,)), ((), ()), 1, (1,))),
    "batch": ((2, 10, 5), (3, 2, 5, 4), (3,), numbers(((2,), (2,)), ((0,), (1,)), 1, (0,))),
    "batch of sizes": (
        (2, 10, 5),
        (3, 2, 5, 4),
        (2, 3),
        numbers(((2,), (2,)), ((0,), (1,)), 1, (0,)),
    ),
    "outer free": ((2, 10, 5), (3, 5, 4), (2, 3), numbers(((2,), (1,)), ((), ()), 1, (0,))),
    "inner free": ((10, 2, 5), (3, 5, 4), (3,), numbers(((2,), (1,)), ((), ()), 0, (0,))),
    "two contracted, two free": (
        (2, 10, 3, 4, 5),
        (3, 4, 5, 2, 3),
        (2, 3),
        numbers(((3, 4), (1, 2)), ((), ()), 1, (0,)),
    ),
    "contraction": ((10, 5), (10, 4), (3,), numbers(((0,), (0,)), ((), ()), 0)),
    "contraction of last": ((5, 10), (4, 10), (3,), numbers(((1,), (1,)), ((), ()), 1)),
    "batched contraction": ((10, 2, 5), (2, 10, 4), (2, 3), numbers(((0,), (1,)), ((1,), (0,)), 0)),
    "outer contracted": ((2, 10, 5), (2, 10, 4), (2, 3), numbers(((0, 1), (0, 1)), ((), ()), 1)),
    "inner contracted": ((10, 2, 5), (10, 2, 4), (3,), numbers(((0, 1), (0, 1)), ((), ()), 0)),
    "ragged batch": ((10, 5, 2), (10, 2, 4), (3,), numbers(((2,), (1,)), ((0,), (0,)), 0)),
}


@pytest.mark.parametrize("case", GENERAL_CASES)
def test_general_matches_lax(case):
    lhs_shape, rhs_shape, sizes_shape, dims = GENERAL_CASES[case]
    lhs, rhs = normal(*lhs_shape), normal(*rhs_shape, seed=1)
    sizes = jnp.asarray(np.random.default_rng(2).integers(0, 5, sizes_shape))
    ours, theirs = (
        f(lhs, rhs, sizes, dims) for f in (jax_tcgemm.ragged_dot_general, lax.ragged_dot_general)
    )
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    check = functools.partial(jax_tcgemm.ragged_dot_general, group_sizes=sizes)
    check_grads(
        lambda a, b: check(a, b, ragged_dot_dimension_numbers=dims),
        (lhs, rhs),
        1,
        ["rev"],
        0.05,
        0.05,
    )


def num_transposes(f, *args):
    return jax.jit(f).lower(*args).as_text().count("stablehlo.transpose")


@pytest.mark.parametrize("case", ["rows", "rhs transposed", "contraction"])
def test_matrices_are_read_in_place(case):
    lhs_shape, rhs_shape, _, dims = GENERAL_CASES[case]

    def f(lhs, rhs):
        sizes = jnp.array([3, 0, 4])
        return jax_tcgemm.ragged_dot_general(lhs, rhs, sizes, dims, implementation="host")

    args = normal(*lhs_shape), normal(*rhs_shape, seed=1)
    assert num_transposes(f, *args) == 0
    grad = jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1))
    assert num_transposes(grad, *args) == 0


# --- choice, errors, malformed calls ------------------------------------------------------------


def test_explain_lists_the_gradients():
    sizes = jnp.array([3, 0, 4])

    def loss(x, w):
        return jnp.sum(jax_tcgemm.ragged_dot(x, w, sizes))

    calls = jax_tcgemm.explain(
        jax.value_and_grad(loss, (0, 1)), normal(8, 5), normal(3, 5, 4), platform="cpu"
    )
    assert [call.implementation for call in calls] == ["host"] * 3
    assert sorted(call.problem.form for call in calls) == ["contraction", "rows", "rows"]
    assert {call.flops for call in calls} == {2 * 8 * 5 * 4}


def test_what_host_cannot_run_goes_to_xla_and_is_said():
    x, w, sizes = jnp.ones((8, 5), jnp.int32), jnp.ones((3, 5, 4), jnp.int32), jnp.array([3, 0, 4])
    (call,) = jax_tcgemm.explain(jax_tcgemm.ragged_dot, x, w, sizes, platform="cpu")
    assert (call.implementation, call.problem) == ("xla", None)
    assert "int32" in call.why
    np.testing.assert_array_equal(jax_tcgemm.ragged_dot(x, w, sizes), lax.ragged_dot(x, w, sizes))
    with pytest.raises(
        ValueError, match="host cannot run this: no implementation multiplies int32"
    ):
        jax_tcgemm.ragged_dot(x, w, sizes, implementation="host")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, SIZES = struct(8, 5), struct(3, 5, 4), struct(3, dtype=jnp.int32)
FORMAT = re.compile(r"^(ragged_dot|ragged_dot_general): .+ must .+, got .+; .+", re.DOTALL)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "says"),
    [
        ((struct(8), W, SIZES), {}, ValueError, "lhs.shape=(8,)"),
        ((struct(8, 6), W, SIZES), {}, ValueError, "lhs.shape=(8, 6)"),
        ((X, struct(5, 4), SIZES), {}, ValueError, "rhs.shape=(5, 4)"),
        ((X, W, struct(4, dtype=jnp.int32)), {}, ValueError, "group_sizes.shape=(4,)"),
        ((X, W, struct(3)), {}, TypeError, "group_sizes.dtype=float32"),
        ((X, W, struct(dtype=jnp.int32)), {}, ValueError, "group_sizes.shape=()"),
        (
            (X, W, struct(2, 3, dtype=jnp.int32)),
            {},
            ValueError,
            "must have shape (s,), got group_sizes.shape=(2, 3)",
        ),
        (
            (X, W, SIZES),
            {"group_offset": np.zeros(2, np.int32)},
            ValueError,
            "group_offset.shape=(2,)",
        ),
        ((X, W, SIZES), {"group_offset": 0.5}, TypeError, "group_offset.dtype=float32"),
        ((X, W, SIZES), {"implementation": "cublaslt"}, ValueError, "implementation='cublaslt'"),
        (
            (X, W, SIZES),
            {"implementation": "host", "config": "magic"},
            ValueError,
            "config='magic'",
        ),
    ],
)
def test_refuses(args, kwargs, error, says):
    with pytest.raises(error) as info:
        jax.eval_shape(functools.partial(jax_tcgemm.ragged_dot, **kwargs), *args)
    assert says in str(info.value)
    assert FORMAT.match(str(info.value)), str(info.value)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ((((1,), (1,)), ((), ())), "must be a jax.lax.RaggedDotDimensionNumbers"),
        (numbers(((1,), (1,)), ((), ()), 0), "must have one group dimension"),
        (numbers(((1,), (1,)), ((), ()), 1, (0,)), "must have no group dimension"),
        (numbers(((1,), (1,)), ((), ()), 2, (0,)), "in [0, 2)"),
        (numbers(((1,), (2,)), ((), ()), 0, (0,)), "must have equal sizes"),
        (numbers(((1,), (1,)), ((), ()), 0, (1,)), "must be distinct"),
    ],
)
def test_general_refuses(dims, says):
    with pytest.raises((TypeError, ValueError)) as info:
        jax.eval_shape(lambda *a: jax_tcgemm.ragged_dot_general(*a, dims), X, W, SIZES)
    assert says in str(info.value)
    assert FORMAT.match(str(info.value)), str(info.value)


GOOD = {
    "abi": modules.cpu.abi_version,
    "implementation": "host",
    "config": "auto",
    "form": "rows",
    "compute": "f32",
    "scales": numbers_of(None),
    **{"batch": 1, "m": 8, "n": 4, "k": 5, "groups": 3, "num_sizes": 3, "a_rows": 0},
    **dict.fromkeys(("b_transposed", "a_batched", "b_batched", "sizes_batched"), False),
    "tokens_last": False,
    **dict.fromkeys(("gated", "gathered"), False),
    **NO_FUNCTION,
}


def raw_call(operands, attributes, shape=(8, 4)):
    call = jax.ffi.ffi_call("tcgemm_ragged", [jax.ShapeDtypeStruct(shape, jnp.float32)])
    return call(*operands, ragged=attributes)[0]


GOOD_OPERANDS = (
    np.ones((8, 5), np.float32),
    np.ones((3, 5, 4), np.float32),
    np.array([3, 0, 4], np.int32),
    np.zeros(1, np.int32),
)


def test_raw_call():
    expected = reference.rows(GOOD_OPERANDS[0], GOOD_OPERANDS[1], [3, 0, 4])
    np.testing.assert_array_equal(raw_call(GOOD_OPERANDS, GOOD), expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"abi": 10**6}, "ABI version"),
        ({"form": "magic"}, "form must be rows or contraction"),
        ({"compute": "magic"}, "compute must be"),
        ({"compute": "f64"}, "compute must be f32 or tf32"),
        ({"implementation": "magic"}, "not part of this build"),
        ({"config": "magic"}, "no config magic"),
        ({"m": -1}, "m must be in"),
        ({"m": 9}, "a must hold at least 45 elements"),
        ({"groups": 4}, "groups must be at most num_sizes=3, got 4"),
        ({"groups": 4, "num_sizes": 4}, "b must hold at least 80 elements"),
        ({"num_sizes": 4}, "group_sizes must hold at least 4 elements"),
        ({"batch": 2, "sizes_batched": True}, "group_sizes must hold at least 6 elements"),
        ({"batch": 2}, "d must hold at least 64 elements"),
        ({"form": "contraction", "b_transposed": True}, "b_transposed must be false"),
        ({"tokens_last": True}, "tokens_last must be false when form is rows"),
        ({"m": 2**31 - 1, "k": 2**31 - 1, "batch": 2**31 - 1}, "fewer than 2^59"),
        ({"form": "contraction", "function": "f"}, "epilogue must be empty"),
        ({"gated": True}, "a gated product must have a function"),
        (
            {"gated": True, "function": "f", "function_results": Numbers.of([4, 0, 1])},
            "b must hold at least 120 elements",
        ),
        ({"gathered": True, "a_rows": 8}, "a, b, group_sizes, group_offset, gather, got 4"),
    ],
    ids=str,
)
def test_malformed_calls_are_refused(change, says):
    with pytest.raises(JaxRuntimeError, match=re.escape(says)):
        jax.block_until_ready(raw_call(GOOD_OPERANDS, GOOD | change))


@pytest.mark.parametrize("index", [1, 2, 3])
def test_operands_of_wrong_dtype_are_refused(index):
    operands = list(GOOD_OPERANDS)
    operands[index] = operands[index].astype(np.int8)
    with pytest.raises(JaxRuntimeError, match="must"):
        jax.block_until_ready(raw_call(operands, GOOD))


@pytest.mark.parametrize("implementation", ["xla", "host"])
@pytest.mark.parametrize("group", [1, 2], ids=["without rows", "with rows"])
@pytest.mark.parametrize("offset", [None, 1])
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_no_row_meets_a_matrix_that_is_not_its_own(implementation, group, offset, special):
    """What is not finite in a matrix is in no row of another group, nor in its gradients."""
    sizes, first = np.array([3, 0, 2, 4], np.int32), offset or 0
    x, w, g = (
        np.asarray(x)
        for x in (normal(11, 8), normal(4 - first, 8, 5, seed=1), normal(11, 5, seed=2))
    )
    own = w.copy()
    own[group - first] = special

    def f(x, w):
        how = {"group_offset": offset, "implementation": implementation}
        return jax_tcgemm.ragged_dot(x, w, sizes, **how)

    ends = np.cumsum(sizes)
    row = np.arange(11)
    is_other = ~((ends[group] - sizes[group] <= row) & (row < ends[group]))
    for run in (lambda f: f, jax.jit):
        out, pullback = jax.vjp(run(f), x, own)
        expected = reference.rows(x, w, sizes, first)
        np.testing.assert_allclose(np.asarray(out)[is_other], expected[is_other], atol=1e-5)
        assert not np.isfinite(np.asarray(out)[~is_other]).any()
        x_bar, w_bar = pullback(g)
        expected = reference.rows(g, w.swapaxes(1, 2), sizes, first)
        np.testing.assert_allclose(np.asarray(x_bar)[is_other], expected[is_other], atol=1e-5)
        assert not np.isfinite(np.asarray(x_bar)[~is_other]).any()
        expected = reference.contraction(x, g, sizes)[first:]
        np.testing.assert_allclose(w_bar, expected, atol=1e-5)
