"""Fused layers: linear, gated_linear and matmul's keywords, against the unfused JAX expression."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import test_util

import jax_tcgemm
from jax_tcgemm.problem.activations import ACTIVATIONS, canonical_activation

# The relative rounding of each result dtype; sums of these lengths err by less in float32.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-21, "float64": 2**-48}

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "host"], ids=["default", "host"])


def normal(seed, *shape, dtype="float64"):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def unfused(x, w, bias=None, *, activation="none", residual=None, alpha=1.0):
    z = alpha * jnp.tensordot(x, w, 1, precision="highest")
    z = z if bias is None else z + bias
    z = ACTIVATIONS[canonical_activation("test", activation)](z)
    return z if residual is None else z + residual


def unfused_gated(x, weights, *, activation="silu", bias=None, residual=None):
    if not isinstance(weights, tuple):
        weights = weights[:, 0], weights[:, 1]
    bias = (0.0, 0.0) if bias is None else bias
    gate, up = (jnp.dot(x, w, precision="highest") + b for w, b in zip(weights, bias, strict=True))
    out = ACTIVATIONS[canonical_activation("test", activation)](gate) * up
    return out if residual is None else out + residual


def assert_near(got, expected, dtype="float32", factor=4):
    """Within a few roundings of the largest expected element."""

    def check(x, y):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        limit = factor * ROUNDING[dtype] * max(np.abs(y).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=limit)

    jax.tree.map(check, got, expected)


def wide(*arrays):
    return [None if a is None else jax.tree.map(lambda x: x.astype(jnp.float64), a) for a in arrays]


def num_calls(f, *args, name="tcgemm_epilogue_product"):
    return str(jax.make_jaxpr(f)(*args)).count(f"{name}[")


# Values


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation, dtype, implementation, x64):
    x, w = normal(0, 3, 5, 24, dtype=dtype), normal(1, 24, 17, dtype=dtype)
    bias, residual = normal(2, 17, dtype=dtype), normal(3, 3, 5, 17, dtype=dtype)
    f = functools.partial(
        jax_tcgemm.linear, activation=activation, alpha=0.7, implementation=implementation
    )
    got = jax.jit(f)(x, w / 5, bias, residual=residual)
    assert got.dtype == dtype
    x, w, bias, residual = wide(x, w / 5, bias, residual)
    expected = unfused(x, w, bias, activation=activation, residual=residual, alpha=0.7)
    assert_near(got, expected, dtype, factor=1)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pair", [False, True], ids=["array", "pair"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", None])
def test_gated_linear(activation, pair, dtype, implementation, x64):
    x, weights = normal(0, 2, 7, 24, dtype=dtype), normal(1, 24, 2, 19, dtype=dtype) / 5
    bias, residual = normal(2, 2, 19, dtype=dtype), normal(3, 2, 7, 19, dtype=dtype)
    f = functools.partial(
        jax_tcgemm.gated_linear, activation=activation, implementation=implementation
    )
    given = ((weights[:, 0], weights[:, 1]), (bias[0], bias[1])) if pair else (weights, bias)
    got = jax.jit(f)(x, given[0], bias=given[1], residual=residual)
    assert got.dtype == dtype
    x, weights, bias, residual = wide(x, weights, bias, residual)
    expected = unfused_gated(x, weights, activation=activation, bias=bias, residual=residual)
    assert_near(got, expected, dtype, factor=1)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    batch=st.lists(st.integers(1, 3), max_size=3),
    k=st.integers(0, 40),
    columns=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    bias=st.sampled_from(["none", "columns", "rows", "scalar", "full", "first column dimension"]),
    residual=st.sampled_from(["none", "full", "row", "scalar"]),
    activation=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 1000),
)
def test_linear_of_any_rank(batch, k, columns, bias, residual, activation, seed):
    shape = (*batch, *columns)
    ones = (1,) * len(columns)
    shapes = {
        "none": None,
        "columns": tuple(columns),
        "rows": (*batch, *ones),
        "scalar": (),
        "full": shape,
        "first column dimension": (columns[0], *ones[1:]),
        "row": tuple(columns),
    }
    with jax.enable_x64(True):
        x, w = normal(seed, *batch, k), normal(seed + 1, k, *columns) / max(k, 1) ** 0.5
        extra = [
            None if shapes[name] is None else normal(seed + i, *shapes[name])
            for i, name in enumerate((bias, residual), 2)
        ]
        got = jax_tcgemm.linear(
            x, w, extra[0], activation=activation, residual=extra[1], implementation="host"
        )
        assert got.shape == shape
        expected = unfused(x, w, extra[0], activation=activation, residual=extra[1])
        assert_near(got, expected, "float64")


@IMPLEMENTATIONS
def test_matmul_takes_the_same_keywords(implementation):
    a, b = normal(0, 3, 1, 5, 6, dtype="float32"), normal(1, 4, 6, 7, dtype="float32")
    bias, residual = normal(2, 7, dtype="float32"), normal(3, 3, 4, 5, 7, dtype="float32")
    got = jax.jit(
        lambda *args: jax_tcgemm.matmul(
            args[0],
            args[1],
            bias=args[2],
            residual=args[3],
            activation="gelu",
            alpha=0.5,
            implementation=implementation,
        )
    )(a, b, bias, residual)
    assert_near(got, jax.nn.gelu(0.5 * (a @ b) + bias) + residual)


def test_float8_operands_have_epilogues():
    """What follows the product is computed in float32."""
    x, w = (normal(i, 4, 4, dtype="float8_e4m3fn") for i in range(2))
    bias = normal(2, 4, dtype="float32")
    got = jax_tcgemm.linear(x, w, bias, activation="silu", preferred_element_type="float32")
    expected = unfused(x.astype("float32"), w.astype("float32"), bias, activation="silu")
    assert_near(got, expected)
    rounded = jax_tcgemm.linear(x, w, bias, activation="silu")
    np.testing.assert_array_equal(rounded, got.astype("float8_e4m3fn"))


def test_rows_of_a_batch_have_biases_of_their_own():
    a, b = normal(0, 3, 5, 6, dtype="float32"), normal(1, 3, 6, 7, dtype="float32")
    for shape in ((3, 1, 7), (3, 5, 1)):
        bias = normal(2, *shape, dtype="float32")
        f = functools.partial(jax_tcgemm.matmul, activation="relu", implementation="host")
        assert_near(f(a, b, bias=bias), jax.nn.relu(a @ b + bias))


def test_nothing_asked_is_a_plain_product():
    x, w = normal(0, 4, 5, dtype="float32"), normal(1, 5, 6, dtype="float32")
    assert num_calls(jax_tcgemm.linear, x, w) == 0
    assert num_calls(jax_tcgemm.linear, x, w, name="tcgemm_dot_general") == 1


@pytest.mark.parametrize("function", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, jnp.tanh, jax.nn.tanh])
def test_activations_are_known_as_functions(function):
    x, w = normal(0, 4, 5, dtype="float32"), normal(1, 5, 6, dtype="float32")
    assert_near(jax_tcgemm.linear(x, w, activation=function), function(x @ w))


# Derivatives


@IMPLEMENTATIONS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_linear_are_those_of_the_expression(activation, implementation):
    x, w = normal(0, 2, 5, 12, dtype="float32"), normal(1, 12, 9, dtype="float32") / 3
    bias, residual = normal(2, 9, dtype="float32"), normal(3, 2, 5, 9, dtype="float32")

    def gradients(f):
        def loss(x, w, bias, residual):
            return jnp.sum(jnp.sin(f(x, w, bias, activation=activation, residual=residual)))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, w, bias, residual)

    f = functools.partial(jax_tcgemm.linear, implementation=implementation)
    assert_near(gradients(f), gradients(unfused))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "silu"])
def test_derivatives_of_linear_by_finite_differences(activation, x64):
    x, w, bias = normal(0, 3, 4), normal(1, 4, 5), normal(2, 5)
    residual = normal(3, 3, 5)

    def f(x, w, bias, residual):
        return jax_tcgemm.linear(
            x, w, bias, activation=activation, residual=residual, alpha=0.8, implementation="host"
        )

    test_util.check_grads(f, (x, w, bias, residual), order=2, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pair", [False, True], ids=["array", "pair"])
def test_derivatives_of_gated_linear_by_finite_differences(pair, x64):
    x, weights, bias = normal(0, 3, 4), normal(1, 4, 2, 5), normal(2, 2, 5)
    weights = (weights[:, 0], weights[:, 1]) if pair else weights

    def f(x, weights, bias):
        return jax_tcgemm.gated_linear(x, weights, bias=bias, implementation="host")

    test_util.check_grads(f, (x, weights, bias), order=2, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)),
        lambda f: jax.hessian(lambda *args: jnp.sum(f(*args) ** 2), (0, 1)),
        lambda f: jax.jacfwd(f, (0, 1, 2)),
        lambda f: jax.jacrev(f, (0, 1, 2)),
        lambda f: lambda *args: jax.linearize(f, *args)[1](*jax.tree.map(jnp.cos, args)),
        lambda f: lambda *args: jax.vjp(f, *args)[1](f(*args)),
        lambda f: jax.grad(jax.checkpoint(lambda *args: jnp.sum(jnp.sin(f(*args)))), (0, 1, 2)),
    ],
    ids=["jvp", "hessian", "jacfwd", "jacrev", "linearize", "vjp", "grad of remat"],
)
def test_transformations_of_linear(transform):
    args = [normal(i, *s, dtype="float32") for i, s in enumerate([(3, 4), (4, 5), (5,)])]
    f = functools.partial(jax_tcgemm.linear, activation="silu", implementation="host")
    g = functools.partial(unfused, activation="silu")
    assert_near(jax.jit(transform(f))(*args), transform(g)(*args), factor=16)


@IMPLEMENTATIONS
def test_linear_transpose_of_what_is_linear(implementation):
    x, w = normal(0, 3, 4, dtype="float32"), normal(1, 4, 5, dtype="float32")

    def f(x):
        return jax_tcgemm.linear(x, w, alpha=2.0, residual=x @ w, implementation=implementation)

    g = f(x)
    assert_near(jax.linear_transpose(f, x)(g)[0], 3 * g @ w.T)


AXES = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (2, 1, 0), (1, None, 0)]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_vmap_and_its_gradients(gated, in_axes):
    shapes = [(5, 6), (6, 2, 7), (2, 7)] if gated else [(5, 6), (6, 7), (7,)]
    args = []
    for seed, (shape, axis) in enumerate(zip(shapes, in_axes, strict=True)):
        shape = shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        args.append(normal(seed, *shape, dtype="float32") / 2)

    def layer(x, w, bias):
        f = jax_tcgemm.gated_linear if gated else jax_tcgemm.linear
        return f(x, w, bias=bias, activation="silu", implementation="host")

    def expected(x, w, bias):
        f = unfused_gated if gated else unfused
        return f(x, w, bias=bias, activation="silu")

    def values(f):
        mapped = jax.vmap(f, in_axes)
        reverse = jax.grad(lambda *args: jnp.sum(jnp.sin(mapped(*args))), (0, 1, 2))
        each = jax.vmap(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2)), in_axes)
        return jax.jit(lambda *args: (mapped(*args), reverse(*args), each(*args)))(*args)

    assert_near(values(layer), values(expected), factor=8)


@IMPLEMENTATIONS
def test_scan_and_shard_map(implementation):
    x, ws = normal(0, 4, 6, dtype="float32"), normal(1, 3, 6, 6, dtype="float32") / 2

    def network(f):
        def loss(x, ws):
            body = jax.checkpoint(lambda x, w: (f(x, w, activation="tanh", residual=x), None))
            return jnp.sum(jax.lax.scan(body, x, ws)[0])

        return jax.jit(jax.grad(loss, (0, 1)))

    f = functools.partial(jax_tcgemm.linear, implementation=implementation)
    assert_near(network(f)(x, ws), network(unfused)(x, ws), factor=16)
    rows, none = jax.P("x"), jax.P()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        lambda x, w: f(x, w, activation="silu"), mesh=mesh, in_specs=(rows, none), out_specs=rows
    )
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(sharded(x, w) ** 2), (0, 1)))(x, ws[0])
    expected = jax.grad(lambda x, w: jnp.sum(unfused(x, w, activation="silu") ** 2), (0, 1))
    assert_near(got, expected(x, ws[0]))


def test_derivatives_inherit_the_implementation_but_not_the_config():
    f = functools.partial(
        jax_tcgemm.linear, activation="silu", implementation="host", config="portable"
    )
    x, w = normal(0, 4, 5, dtype="float32"), normal(1, 5, 3, dtype="float32")
    calls = jax_tcgemm.explain(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)), x, w)
    assert [call.implementation for call in calls] == ["host"] * 3
    assert [call.config for call in calls] == ["portable", "auto", "auto"]


# What it becomes


def test_explain_shows_the_fused_call_and_what_could_not_be_fused(fake_cuda):
    x, w = normal(0, 4, 5, dtype="float32"), normal(1, 5, 6, dtype="float32")
    f = functools.partial(jax_tcgemm.linear, activation="silu")
    for bias in (None, normal(2, 6, dtype="float32"), normal(2, 4, 6, dtype="float32")):
        (call,) = jax_tcgemm.explain(f, x, w, bias, platform="cuda")
        assert call.implementation == "wgmma"
        assert len(call.problem.function.reads) == (bias is not None)
    (call,) = jax_tcgemm.explain(functools.partial(f, implementation="host"), x, w)
    assert call.problem.function is None
    assert call.why.startswith("unfused: on the CPU XLA runs the function")
    assert call.implementation == "host"


def test_what_no_implementation_takes_runs_unfused(fake_cuda):
    fake_cuda.rejects |= dict.fromkeys(fake_cuda.implementations(), "no epilogue today")
    x, w = normal(0, 4, 5, dtype="float32"), normal(1, 5, 6, dtype="float32")
    f = functools.partial(jax_tcgemm.linear, activation="silu")
    (call,) = jax_tcgemm.explain(f, x, w, platform="cuda")
    assert call.implementation == "xla"
    text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "tcgemm_gemm" not in text
    with pytest.raises(ValueError, match="wgmma cannot run this: no epilogue today"):
        jax_tcgemm.explain(functools.partial(f, implementation="wgmma"), x, w, platform="cuda")


@pytest.mark.parametrize(("columns", "ran"), [(1, "host"), (512, "xla")])
def test_default_on_cpu_follows_the_rule_of_plain_products(columns, ran, cpu_rule):
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, columns), jnp.bfloat16)
    fused = jax_tcgemm.explain(lambda x, w: jax_tcgemm.linear(x, w, activation="silu"), x, w)
    (bare,) = jax_tcgemm.explain(jax_tcgemm.linear, x, w)
    assert fused[0].implementation == bare.implementation
    if "AVX-512" not in bare.why:  # said of a processor that has neither that nor AVX2
        assert bare.implementation == ran


def test_residual_takes_the_results_place_only_when_it_may(fake_cuda):
    x, w = normal(0, 4, 5, dtype="bfloat16"), normal(1, 5, 6, dtype="bfloat16")
    residual = normal(2, 4, 6, dtype="bfloat16")
    for donate in (False, True):
        f = functools.partial(jax_tcgemm.linear, donate_residual=donate)
        lowered = jax.jit(lambda x, w, r: f(x, w, residual=r)).trace(x, w, residual)  # noqa: B023
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert ("output_operand_alias" in text) == donate
        assert text.count("@tcgemm_gemm") == 1


@pytest.mark.parametrize(
    "layer",
    [
        jax_tcgemm.linear,
        jax_tcgemm.matmul,
        functools.partial(jax_tcgemm.gated_linear, activation=None),
    ],
    ids=["linear", "matmul", "gated_linear"],
)
def test_a_donated_residual_is_not_copied(layer):
    x, w = normal(0, 64, 32, dtype="bfloat16"), normal(1, 32, 48, dtype="bfloat16")
    residual = normal(2, 64, 48, dtype="bfloat16")
    wide = [a.astype(jnp.float32) for a in (x, w)]
    expected = residual + wide[0] @ wide[1]
    if isinstance(layer, functools.partial):
        w = (w, w)
        expected = residual + (wide[0] @ wide[1]) ** 2

    def f(x, w, residual):
        return layer(x, w, residual=residual, donate_residual=True, implementation="host")

    compiled = jax.jit(f, donate_argnums=2).lower(x, w, residual).compile()
    assert " copy(" not in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == residual.nbytes
    assert_near(compiled(x, w, residual), expected, "bfloat16")
    assert residual.is_deleted()


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, w: jax_tcgemm.linear(x, w.T),
            ValueError,
            "linear: the last dimension of x",
        ),
        (lambda x, w: jax_tcgemm.linear(x, w[0]), ValueError, "which must have two, got x.shape"),
        (
            lambda x, w: jax_tcgemm.linear(x, w, activation="gelu2"),
            ValueError,
            "activation must be None, gelu, one of none, relu.*got activation='gelu2'",
        ),
        (lambda x, w: jax_tcgemm.linear(x, w, activation=3), TypeError, "got activation=3"),
        (lambda x, w: jax_tcgemm.linear(x, w, activation=[]), TypeError, "activation=\\[\\]"),
        (lambda x, w: jax_tcgemm.linear(x, w, activation=jnp.sin), ValueError, "apply others to"),
        (
            lambda x, w: jax_tcgemm.linear(x, w, x[0]),
            ValueError,
            "bias must broadcast to the shape",
        ),
        (
            lambda x, w: jax_tcgemm.linear(x, w, residual=x),
            ValueError,
            r"residual must broadcast to the shape \(3, 5\), got residual.shape=\(3, 4\)",
        ),
        (lambda x, w: jax_tcgemm.linear(x, w, alpha=x), TypeError, "alpha must be a real number"),
        (
            lambda x, w: jax_tcgemm.linear(x, w, alpha=np.complex64(1j)),
            TypeError,
            "got alpha of type complex64",
        ),
        (
            lambda x, w: jax_tcgemm.linear(x, w, residual=1j),
            TypeError,
            "residual must be of a kind that the result can hold, got residual.dtype=complex",
        ),
        (
            lambda x, w: jax_tcgemm.gated_linear(x, (w, w), bias=1j * jnp.ones((2, 5))),
            TypeError,
            "gated_linear: bias must be of a kind",
        ),
        (
            lambda x, w: jax_tcgemm.matmul(x.astype("int8"), w.astype("int8"), bias=0.5),
            TypeError,
            "a result of int8; convert it or set preferred_element_type",
        ),
        (
            lambda x, w: jax_tcgemm.linear(x, w, precision="exact"),
            ValueError,
            "linear: precision must be None",
        ),
        (
            lambda x, w: jax_tcgemm.linear(x.astype(int), w.astype(int), activation="relu"),
            TypeError,
            "activation must be None for a result that is not real floating point",
        ),
        (
            lambda x, w: jax_tcgemm.gated_linear(x, w),
            ValueError,
            r"gated_linear: weights must be an array of shape \(k, 2, n\) or a pair",
        ),
        (lambda x, w: jax_tcgemm.gated_linear(x, (w, w[:, :2])), ValueError, "make them alike"),
        (
            lambda x, w: jax_tcgemm.gated_linear(x, (w, w), bias=w[0]),
            ValueError,
            r"bias must have shape \(2, n\) or be a pair",
        ),
        (
            lambda x, w: jax_tcgemm.matmul(x, w, bias=x[0]),
            ValueError,
            "matmul: bias must broadcast",
        ),
        (lambda x, w: jax_tcgemm.linear(x, w, biass=x), TypeError, "unexpected keyword"),
    ],
)
def test_errors(call, error, message):
    x, w = normal(0, 3, 4, dtype="float32"), normal(1, 4, 5, dtype="float32")
    with pytest.raises(error, match=message):
        call(x, w)
