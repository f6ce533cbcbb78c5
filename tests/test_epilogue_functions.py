"""Products with a function of JAX as their epilogue, against the same function of JAX's product."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.extend import core
from written_functions import (
    DTYPES,
    FUNCTIONS,
    KEY,
    NN,
    ROUNDING,
    ROUNDING_OF_DERIVATIVES,
    K,
    M,
    N,
    arguments,
    assert_near,
    dropout,
    loss,
    moving,
    normal,
    ours,
    params_of,
    quantize,
    row_maxima,
    soft_cap,
    theirs,
    two_results,
    wide,
)

import jax_tcgemm
from jax_tcgemm.epilogues.reductions import split_off_reductions

# --- values and derivatives ---------------------------------------------------------------------


@DTYPES
@FUNCTIONS
def test_values(function, dtype, x64):
    args = arguments(function, dtype)
    expected = jax.jit(theirs(function))(*wide(args))
    for f in (ours(function), jax.jit(ours(function))):
        got = f(*args)
        # What is rounded to integers may be one off.
        assert_near(got, expected, 0.01 if function is quantize else ROUNDING[dtype])
    types = jax.eval_shape(theirs(function), *arguments(function, "float64"))
    if dtype == "float64":
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, types)


@DTYPES
@FUNCTIONS
def test_first_derivatives(function, dtype, x64):
    if function is quantize:
        pytest.skip("its result has no derivatives")
    args = arguments(function, dtype)
    which = moving(args)
    got = jax.jit(jax.grad(loss(ours(function)), which))(*args)
    expected = jax.jit(jax.grad(loss(theirs(function)), which))(*wide(args))
    # A result in bfloat16 rounds its own cotangent.
    rounding = 2**-7 if function is two_results else ROUNDING_OF_DERIVATIVES[dtype]
    assert_near(jax.tree.map(lambda x: x.astype(jnp.float64), got), expected, rounding)


@FUNCTIONS
def test_second_derivatives(function, x64):
    if function in (quantize, two_results):
        pytest.skip("its results have none in float64")
    args = arguments(function, "float64")
    which = moving(args)

    def slopes(f):
        grads = jax.grad(loss(f), which)
        return lambda *args: sum(jnp.sum(jnp.cos(g)) for g in grads(*args))

    own, other = slopes(ours(function)), slopes(theirs(function))
    for second in (lambda f: jax.jit(jax.grad(f, which)), _forward_over(which)):
        assert_near(second(own)(*args), second(other)(*args), 1e-11)


def _forward_over(which):
    def second(f):
        def run(*args):
            given = [args[i] for i in which]

            def of_moving(*xs):
                replaced = list(args)
                for i, x in zip(which, xs, strict=True):
                    replaced[i] = x
                return f(*replaced)

            return jax.jvp(of_moving, given, [jnp.cos(x) for x in given])

        return run

    return second


@pytest.mark.parametrize("rhs_dtype", ["int8", "uint8"])
def test_integers_requantized(rhs_dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-128, 128, (M, K)), jnp.int8)
    w = jnp.asarray(rng.integers(0, 100, (K, N)), rhs_dtype)
    scale = jnp.asarray(rng.uniform(0.001, 0.01, N), jnp.float32)

    def requantize(acc, scale):
        assert acc.dtype == jnp.int32
        return jnp.clip(jnp.round(acc * scale), -128, 127).astype(jnp.int8), acc * scale

    got, _ = jax.jit(ours(requantize))(x, w, scale)
    exact = np.asarray(x, np.int64) @ np.asarray(w, np.int64)
    expected = np.clip(np.round(exact * np.asarray(scale)), -128, 127)
    np.testing.assert_array_equal(got, expected)
    slope = jax.grad(lambda scale: ours(requantize)(x, w, scale)[1].sum())(scale)
    np.testing.assert_allclose(slope, exact.sum(0), rtol=1e-5)


def test_shapes_of_matmul_dot_general_and_linear():
    def f(acc, bias):
        assert acc.shape[-1:] == bias.shape[-1:] or bias.ndim == 0
        return jnp.tanh(acc) + bias

    shapes = [
        ((K,), (K, N), (N,)),
        ((M, K), (K,), (M,)),
        ((K,), (K,), ()),
        ((3, 1, M, K), (2, K, N), (2, 1, N)),
        ((2, M, K), (K, N), (2, 1, 1)),
    ]
    for a, b, bias in shapes:
        args = normal(0, *a, dtype="float32"), normal(1, *b, dtype="float32"), jnp.ones(bias)

        def plain(a, b, bias):
            return jnp.tanh(jnp.matmul(a, b, precision="highest")) + bias

        got = ours(lambda acc, bias: jnp.tanh(acc) + bias)(*args)
        assert_near(got, plain(*args), 1e-6)
    x, w, bias = normal(0, 2, 3, K, dtype="float32"), normal(1, K, N, dtype="float32"), jnp.ones(N)
    got = ours(f, product=jax_tcgemm.linear)(x, w, bias)
    assert_near(got, jnp.tanh(jnp.matmul(x, w, precision="highest")) + bias, 1e-6)
    heads = (((3,), (3,)), ((0, 2), (0, 2)))
    q, k = normal(0, 2, 6, 4, 8, dtype="float32"), normal(1, 2, 5, 4, 8, dtype="float32")
    got = jax_tcgemm.dot_general(q, k, heads, epilogue=soft_cap)
    expected = lax.dot_general(q, k, heads, precision="highest")
    assert_near(got, soft_cap(expected), 1e-6)


def test_results_are_as_the_function_arranges_them():
    x = jnp.ones((4, 4))

    def f(acc):
        return {"a": [acc, (acc > 0,)], "b": None, "c": acc.sum(), "d": acc.max(0, keepdims=True)}

    out = jax_tcgemm.matmul(x, x, epilogue=f)
    assert jax.tree.map(jnp.shape, out) == {
        **{"a": [(4, 4), ((4, 4),)], "b": None, "c": (), "d": (1, 4)},
    }


STATISTICS = {
    "share": lambda z, b: jnp.mean(z > 0),
    "count": lambda z, b: jnp.sum(z > b),
    "constant": lambda z, b: 2.0,
    "integer": lambda z, b: 7,
    "input": lambda z, b: b,
    "stopped": lambda z, b: lax.stop_gradient(z).max(axis=1),
    "of a function": lambda z, b: jax.jit(lambda z: (z.sum(), 3.0))(z)[1],
    "signs": lambda z, b: jnp.sign(z),
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
def test_statistics_beside_what_has_a_gradient(statistic):
    x, w, b = (jax.random.normal(KEY, shape) for shape in ((16, 24), (24, 8), (8,)))

    def step(product):
        def f(x, w, b):
            out, found = product(x, w, lambda z: (jnp.tanh(z) * b, statistic(z, b)))
            return jnp.sum(out**2), found

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)

    got = jax.jit(step(lambda x, w, f: jax_tcgemm.matmul(x, w, epilogue=f)))(x, w, b)
    with jax.enable_x64(True):
        wider = (np.asarray(a, np.float64) for a in (x, w, b))
        expected = step(lambda x, w, f: f(x @ w))(*map(jnp.asarray, wider))
    for value, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)


# --- transformations ----------------------------------------------------------------------------


AXES = {
    "lhs": (0, None, None, None),
    "lhs by its columns": (2, None, None, None),
    "rhs": (None, 1, None, None),
    "both": (1, 2, None, None),
    "a vector": (None, None, 1, None),
    "a matrix": (None, None, None, 2),
    "all": (0, 1, 1, 0),
    "lhs and a matrix": (0, None, None, 1),
}


def test_two_results_in_one_array():
    x, w = normal(0, M, K), normal(1, K, N)

    def stacked(acc):
        return jnp.stack([acc, -acc], 1), acc.max(-1)

    def f(x, **how):
        return jax_tcgemm.matmul(x, w, epilogue=stacked, **how)

    expected = stacked(x @ w)
    for got, wanted in zip(f(x), expected, strict=True):
        assert_near(got, wanted, 1e-5)
    both, largest = jax.vmap(f)(jnp.stack([x, x]))
    assert_near(both[1], expected[0], 1e-5)
    assert_near(largest[1], expected[1], 1e-5)
    forced = functools.partial(f, implementation="wgmma")
    (call,) = jax_tcgemm.explain(forced, x, platform="cuda")
    assert [x.over for x in call.problem.function.results] == ["", "beside", "columns"]


@pytest.mark.surface
@pytest.mark.parametrize("in_axes", AXES.values(), ids=AXES.keys())
def test_vmap(in_axes):
    shapes = [[M, K], [K, N], [N], [M, N]]
    for shape, axis in zip(shapes, in_axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    args = [normal(i, *shape, dtype="float32") for i, shape in enumerate(shapes)]

    def f(acc, scale, residual):
        z = jnp.tanh(acc / 4) * scale + residual
        return z, z.sum(0), acc.max(-1)

    own, other = (jax.vmap(g(f), in_axes) for g in (ours, theirs))
    assert_near(jax.jit(own)(*args), jax.jit(other)(*args), 4e-6)

    def grads(g):
        return jax.vmap(jax.grad(lambda *args: jnp.sin(g(*args)[0]).sum(), (0, 1, 2, 3)), in_axes)

    own, other = grads(ours(f)), grads(theirs(f))
    assert_near(jax.jit(own)(*args), jax.jit(other)(*args), 1e-5)
    calls = params_of(jax.vmap(ours(f), in_axes), *args)
    is_product = in_axes[0] is not None or in_axes[1] is not None
    assert len(calls) == is_product
    if is_product:
        # The function is elementwise still: it has no transposition.
        source, _ = jax_tcgemm.epilogues.emit(calls[0].params["function"])
        assert len(source.results) == 3


def test_vmap_of_an_elementwise_function_leaves_the_product_where_it_folds():
    x, w = normal(0, M, K), normal(1, K, 3, N)

    def f(acc, scale, residual):
        return jnp.tanh(acc) * scale + residual + lax.broadcasted_iota(jnp.float32, acc.shape, 1)

    mapped = jax.vmap(ours(f), (None, 1, None, 1))
    args = x, w, normal(2, N), normal(3, M, 3, N)
    (call,) = params_of(mapped, *args)
    assert call.outvars[0].aval.shape == (M, 3, N)
    source, _ = jax_tcgemm.epilogues.emit(call.params["function"])
    assert [read.dimensions for read in source.reads] == [(2,), (0, 1, 2)]
    assert_near(mapped(*args), jax.vmap(theirs(f), (None, 1, None, 1))(*args), 4e-6)


@pytest.mark.surface
def test_vmap_over_keys_and_of_what_closes_over_what_is_mapped():
    keys, x, w = jax.random.split(KEY, 3), normal(0, 3, M, K), normal(1, K, N)
    got = jax.vmap(ours(dropout), (0, None, 0))(x, w, keys)
    expected = jax.vmap(theirs(dropout), (0, None, 0))(x, w, keys)
    assert_near(got, expected, 1e-6)

    def closing(product):
        def f(x, w, b):
            return product(lambda acc: jnp.tanh(acc) * b + jnp.arange(N))(x, w)

        return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2))

    b = normal(2, 3, N)
    got = jax.jit(jax.vmap(closing(ours), (0, None, 0)))(x, w, b)
    assert_near(got, jax.vmap(closing(theirs), (0, None, 0))(x, w, b), 1e-5)


@pytest.mark.surface
def test_scan_and_remat():
    x, w, scale = normal(0, K, K), normal(1, K, K) / 5, normal(2, 4, K)

    def run(product, wrap):
        layer = wrap(lambda x, scale: product(lambda acc, s: jnp.tanh(acc * s))(x, w, scale))
        return jax.grad(
            lambda x, scale: lax.scan(lambda x, s: (layer(x, s), ()), x, scale)[0].sum(), (0, 1)
        )(x, scale)

    saving = functools.partial(jax.checkpoint, policy=jax_tcgemm.checkpoint_policies.dots_saveable)
    expected = run(theirs, lambda f: f)
    for wrap in (lambda f: f, jax.checkpoint, saving):
        assert_near(run(ours, wrap), expected, 1e-5)


@pytest.mark.surface
def test_only_what_derivatives_need_is_kept():
    x, w, b = normal(0, M, K), normal(1, K, N), normal(2, N)

    def num_results(f, which):
        (call,) = params_of(jax.grad(lambda *args: ours(f)(*args).sum(), which), x, w, b)
        return len(call.outvars)

    assert num_results(lambda acc, b: 2 * acc + b, (0, 1, 2)) == 1
    assert num_results(lambda acc, b: acc * b, (0, 1)) == 1
    assert num_results(lambda acc, b: acc * b, (2,)) == 2
    assert num_results(lambda acc, b: jnp.where(b > 0, acc, 0), (0, 1)) == 1
    assert num_results(lambda acc, b: jnp.sin(acc) + b, (2,)) == 1
    assert num_results(lambda acc, b: jnp.sin(acc), (0,)) == 2
    # The accumulator is a result already.
    (call,) = params_of(jax.grad(lambda x: ours(lambda acc: (jnp.sin(acc), acc))(x, w)[0].sum()), x)
    assert len(call.outvars) == 2


@pytest.mark.parametrize("axis", [1, 2])
def test_sums_of_operands_of_a_stacked_result_are_split_off(axis):
    """XLA then sums the stored result of the call if no kernel can."""

    def function(acc, saved):
        both = jnp.sin(acc) * saved, jnp.cos(acc)
        return [jnp.stack(both, axis), *(x.sum(0) for x in both)]

    acc, saved = normal(0, M, N), normal(1, N)
    elementwise, rest = split_off_reductions(jax.make_jaxpr(function)(acc, saved))
    assert [x.shape for x in elementwise.out_avals] == [function(acc, saved)[0].shape]
    got = core.jaxpr_as_fun(rest)(*core.jaxpr_as_fun(elementwise)(acc, saved))
    assert_near(got, function(acc, saved), 1e-6)


def rounded_gelu(acc):
    return jax.nn.gelu(acc.astype(jnp.bfloat16))


def masked(acc, scale):
    return jnp.where(acc > 0, jnp.sin(acc * scale), 0).astype(jnp.float16)


@pytest.mark.parametrize(
    ("function", "dtypes"),
    [
        (rounded_gelu, ["bfloat16", "bfloat16"]),  # as rounded, not the accumulator
        (masked, ["float16", "float32"]),  # the accumulator alone says all
        (jnp.exp, ["float32"]),  # its own derivative
        (lambda acc: jax.nn.sigmoid(acc), ["float32"]),
        (lambda acc: (jnp.exp(acc), acc.sum(-1)), ["float32", "float32"]),
        (lambda acc: jnp.tanh(acc).astype(jnp.bfloat16), ["bfloat16", "float32"]),
    ],
    ids=["rounded", "masked", "exp", "sigmoid", "sums", "tanh"],
)
def test_the_fewest_bytes_are_kept_for_derivatives(function, dtypes):
    x, w, scale = normal(0, M, K), normal(1, K, N), normal(2, N)
    operands = (scale,) if function is masked else ()

    def loss(product, x, w, *operands):
        found = product(function)(x, w, *operands)
        return sum(y.astype(jnp.float32).sum() for y in jax.tree.leaves(found))

    of_ours = jax.grad(functools.partial(loss, ours), (0, 1))
    (call,) = params_of(of_ours, x, w, *operands)
    assert sorted(str(v.aval.dtype) for v in call.outvars) == sorted(dtypes)
    tolerance = 1e-5 if "bfloat16" not in dtypes else 2e-2
    expected = jax.grad(functools.partial(loss, theirs), (0, 1))(x, w, *operands)
    assert_near(of_ours(x, w, *operands), expected, tolerance)


def test_products_of_derivatives_are_in_the_dtype_of_the_operands():
    x, w = normal(0, M, K, dtype="bfloat16"), normal(1, K, N, dtype="bfloat16")
    f = jax.grad(lambda x, w: ours(soft_cap)(x, w).sum(), (0, 1))
    report = jax_tcgemm.explain(f, x, w, platform="cpu")
    products = [x for x in jax.make_jaxpr(f)(x, w).eqns if x.primitive.name == "tcgemm_dot_general"]
    assert len(report) == 3
    for call in products:
        assert {v.aval.dtype for v in (*call.invars, *call.outvars)} == {jnp.dtype("bfloat16")}


@pytest.mark.surface
def test_linear_transpose_jet_and_custom_derivatives():
    x, w = normal(0, M, K), normal(1, K, N)
    g = jnp.ones((M, N))

    def transposed(product):
        return jax.linear_transpose(lambda x: product(lambda acc: 3 * acc)(x, w), x)(g)

    assert_near(transposed(ours), transposed(theirs), 1e-6)

    def series(product):
        terms = (jnp.ones_like(x), jnp.zeros_like(x))
        return jet.jet(lambda x: product(jnp.tanh)(x, w), (x,), (terms,))

    assert_near(series(ours), series(theirs), 1e-4)

    @jax.custom_vjp
    def clipped(z):
        return jnp.clip(z, -1, 1)

    clipped.defvjp(lambda z: (clipped(z), z), lambda z, g: (g * jnp.exp(-z * z),))

    def grads(product):
        f = product(lambda acc, b: clipped(acc + b) * b)
        return jax.jit(jax.grad(lambda *args: f(*args).sum(), (0, 1, 2)))(x, w, jnp.arange(1.0, 17))

    assert_near(grads(ours), grads(theirs), 1e-5)


@pytest.mark.surface
def test_hessians_and_arguments_without_derivatives():
    x, w, s = normal(0, 4, 5), normal(1, 5, 6), normal(2, 6)

    def hessian(product):
        f = product(lambda acc, s: jnp.tanh(acc * s).sum())
        return jax.hessian(f, (0, 2))(x, w, s)

    assert_near(hessian(ours), hessian(theirs), 1e-5)

    def f(acc, s, k):
        return acc * k, acc > 0

    k = jnp.arange(6)
    no_tangent = np.zeros(6, jax.dtypes.float0)
    _, tangents = jax.jvp(lambda x, k: ours(f)(x, w, s, k), (x, k), (x, no_tangent))
    assert_near(tangents[0], x @ w * k, 1e-5)
    assert tangents[1].dtype == jax.dtypes.float0
    _, pull = jax.vjp(lambda x, key: ours(dropout)(x, w, key), x, KEY)
    assert pull(jnp.ones((4, 6)))[1].dtype == jax.dtypes.float0


def test_other_dtypes_and_empty_products():
    x, w = normal(0, 4, 5), normal(1, 5, 6)
    z, v = (x + 1j * x[::-1]).astype(jnp.complex64), w.astype(jnp.complex64)

    def slope(product):
        return jax.grad(lambda z: abs(product(lambda acc: acc * acc)(z, v)).sum())(z)

    np.testing.assert_allclose(slope(ours), slope(theirs), rtol=1e-4)
    narrow = [a.astype(jnp.float8_e4m3fn) for a in (x, w)]
    assert jax_tcgemm.matmul(*narrow, epilogue=jnp.tanh).dtype == jnp.float32
    assert jax_tcgemm.matmul(x > 0, w > 0, epilogue=jnp.logical_not).dtype == bool
    mixed = jax.grad(lambda x: jax_tcgemm.matmul(x, k, epilogue=jnp.tanh).sum())
    k = jnp.ones((5, 6), jnp.int8)
    assert_near(mixed(x), jax.grad(lambda x: jnp.tanh(x @ jnp.ones((5, 6))).sum())(x), 1e-5)
    numbers = jax_tcgemm.matmul(x, w, epilogue=jnp.multiply, epilogue_operands=[2])
    assert_near(numbers, 2 * (x @ w), 1e-5)
    assert jax_tcgemm.matmul(x[:0], w, epilogue=jnp.cos).shape == (0, 6)
    assert (jax_tcgemm.matmul(x[:, :0], w[:0], epilogue=jnp.cos) == 1).all()


@pytest.mark.surface
def test_one_trace_for_each_function_and_types():
    traces = []

    def f(acc, b):
        traces.append(acc.shape)
        return acc + b

    x, w = jnp.ones((4, 5)), jnp.ones((5, 6))
    for _ in range(3):
        ours(f)(x, w, jnp.ones(6))
    assert traces == [(4, 6)]
    ours(f)(x[:2], w, jnp.ones(6))
    assert traces == [(4, 6), (2, 6)]
    with jax.enable_x64(True):
        ours(f)(x, w, jnp.ones(6, jnp.float32))
    assert len(traces) == 3

    class Unhashable:
        __hash__ = None

        def __call__(self, acc):
            return -acc

    assert jax_tcgemm.matmul(x, w, epilogue=Unhashable())[0, 0] == -5
    # What is closed over may be another array the next time.
    box = [jnp.ones(6)]
    add = lambda acc: acc + box[0]  # noqa: E731
    assert ours(add)(x, w)[0, 0] == 6
    box[0] = jnp.zeros(6)
    assert ours(add)(x, w)[0, 0] == 5


@pytest.mark.surface
def test_what_is_closed_over_becomes_operands_wherever_that_is():
    x, w, b = normal(0, M, K), normal(1, K, N), normal(2, N)

    @jax.custom_jvp
    def scaled(acc):
        return acc * b

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * b))

    def f(acc):
        return jax.jit(lambda acc: jax.jit(scaled)(acc) + b)(acc) + 1

    (call,) = params_of(ours(f), x, w)
    function = call.params["function"]
    assert not function.consts
    source, constants = jax_tcgemm.epilogues.emit(function)
    assert not constants
    assert {read.operand for read in source.reads} <= {*range(len(function.in_avals) - 1)}
    assert_near(ours(f)(x, w), x @ w * b + b + 1, 1e-5)


@pytest.mark.surface
def test_export_round_trip():
    x, w = normal(0, M, K, dtype="float32"), normal(1, K, N, dtype="float32")
    f = jax.jit(lambda x, w: ours(row_maxima)(x, w))
    checks = [jax.export.DisabledSafetyCheck.custom_call("tcgemm_gemm")]
    exported = jax.export.export(f, disabled_checks=checks)(x, w)
    exported = jax.export.deserialize(exported.serialize())
    assert_near(list(exported.call(x, w)), list(theirs(row_maxima)(x, w)), 1e-6)
    (rows,) = jax.export.symbolic_shape("m")
    symbolic = jax.ShapeDtypeStruct((rows, K), jnp.float32)
    exported = jax.export.export(jax.jit(ours(soft_cap)))(symbolic, w)
    assert_near(exported.call(x, w), soft_cap(x @ w), 1e-4)


# --- explain ------------------------------------------------------------------------------------


def test_explain():
    x, w = jnp.ones((M, K)), jnp.ones((K, N))
    (call,) = jax_tcgemm.explain(ours(soft_cap), x, w, platform="cpu")
    assert (call.problem.m, call.problem.n, call.problem.k) == (M, N, K)
    assert call.why.startswith("unfused: ")
    assert "; its product: " in call.why
    assert "written_functions.py" in call.source
    assert call.code == ""


def test_explain_finds_products_of_the_function_itself():
    x = jnp.ones((8, 8))
    f = ours(lambda acc, b: acc + jax_tcgemm.matmul(b, b))
    assert_near(f(x, x, x), 2 * (x @ x), 1e-6)
    assert len(jax_tcgemm.explain(f, x, x, x, platform="cpu")) == 2


def test_explain_shows_generated_code(monkeypatch):
    from jax_tcgemm.device.fusion import fused

    monkeypatch.setattr(fused.Plan, "code", "struct Epilogue {};\n", raising=False)
    x, w = jnp.ones((M, K)), jnp.ones((K, N))
    report = jax_tcgemm.explain(ours(soft_cap), x, w, platform="cpu", source=True)
    assert report[0].code == "struct Epilogue {};\n"
    assert "\n0:\nstruct Epilogue {};" in str(report)
    assert "struct" not in str(jax_tcgemm.explain(ours(soft_cap), x, w, platform="cpu"))
    with pytest.raises(TypeError, match="explain: source must be True or False, got"):
        jax_tcgemm.explain(ours(soft_cap), x, w, source=1)


# --- errors -------------------------------------------------------------------------------------

X, W = jnp.ones((4, 5)), jnp.ones((5, 6))
ERRORS = {
    "not a function": (
        {"epilogue": "tanh"},
        (TypeError, "epilogue must be a function of arrays or None, got epilogue of type str"),
    ),
    "operands alone": (
        {"epilogue_operands": (1.0,)},
        (ValueError, r"epilogue_operands must be \(\) without an epilogue, got 1 operands"),
    ),
    "an array for operands": (
        {"epilogue": jnp.add, "epilogue_operands": jnp.ones(6)},
        (TypeError, "epilogue_operands must be a tuple or list of arrays, got"),
    ),
    "an operand that is none": (
        {"epilogue": jnp.add, "epilogue_operands": ("a",)},
        (TypeError, r"epilogue_operands\[0\] must be an array, got"),
    ),
    "an operand of another shape": (
        {"epilogue": jnp.add, "epilogue_operands": (jnp.ones(4),)},
        (ValueError, r"epilogue_operands\[0\] must broadcast to the shape \(4, 6\), got"),
    ),
    "a result of another shape": (
        {"epilogue": jnp.transpose},
        (
            ValueError,
            r"epilogue must return arrays of the shape \(4, 6\) or reduced .*one of shape",
        ),
    ),
    "one of the results": (
        {"epilogue": lambda acc: (acc, acc.reshape(24))},
        (ValueError, r"epilogue must return arrays .*got result 1 of shape \(24,\)"),
    ),
    "no result": (
        {"epilogue": lambda acc: ()},
        (ValueError, "epilogue must return an array at least, got"),
    ),
    "a result that is no array": (
        {"epilogue": lambda acc: (acc, "name")},
        (TypeError, "epilogue must return arrays of numeric dtypes, got a result of type str"),
    ),
    "a key": (
        {"epilogue": lambda acc: (acc, jax.random.key(0))},
        (TypeError, "epilogue must return arrays of numeric dtypes, got"),
    ),
    "effects": (
        {"epilogue": lambda acc: (jax.debug.print("{}", acc), acc)[1]},
        (ValueError, "epilogue must have no effects, got"),
    ),
    "a dtype": (
        {"epilogue": jnp.tanh, "preferred_element_type": jnp.float32},
        (ValueError, "preferred_element_type must be None beside an epilogue, got"),
    ),
}
BESIDE = {
    **{"bias": jnp.ones(6), "activation": "relu", "residual": jnp.ones((4, 6)), "alpha": 2},
    "donate_residual": True,
}
PRODUCTS = {
    "matmul": jax_tcgemm.matmul,
    "linear": jax_tcgemm.linear,
    "dot_general": lambda x, w, **how: jax_tcgemm.dot_general(x, w, NN, **how),
}


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize(("how", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_refuses(how, error, op):
    kind, message = error
    with pytest.raises(kind, match=f"^{op}: {message}.*; "):
        PRODUCTS[op](X, W, **how)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_refuses_what_an_epilogue_takes_the_place_of(op, name):
    message = f"^{op}: {name} must be .* beside an epilogue, got {name} of type .*; let the"
    with pytest.raises(ValueError, match=message):
        PRODUCTS[op](X, W, epilogue=jnp.tanh, **{name: BESIDE[name]})


@pytest.mark.parametrize("op", PRODUCTS)
def test_what_cannot_run_is_refused_by_name(op):
    f = functools.partial(PRODUCTS[op], epilogue=jnp.tanh, implementation="wgmma")
    for attempt in (lambda: jax.jit(f).lower(X, W), lambda: jax_tcgemm.explain(f, X, W)):
        with pytest.raises(ValueError, match=f"^{op}: implementation must be able to"):
            attempt()


def test_a_function_that_fails_fails_as_it_is():
    def f(acc):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine"):
        jax_tcgemm.matmul(X, W, epilogue=f)


def test_equal_functions_of_zeros_with_other_signs():
    @dataclasses.dataclass(frozen=True)
    class Times:
        number: float

        def __call__(self, acc):
            return acc * self.number

    x = normal(0, 4, 4)
    for number in (0.0, -0.0):
        for got in (
            jax_tcgemm.matmul(x, x, epilogue=Times(number)),
            jax_tcgemm.matmul(x, x, alpha=number),
        ):
            np.testing.assert_array_equal(np.signbit(got), np.signbit((x @ x) * number))
