"""`accelerate`: which equations go with which product, and that programs compute what they did."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import (
    EPILOGUE,
    LAYER,
    K,
    M,
    N,
    check,
    check_every_product,
    equations,
    groups,
    layer,
    names,
    num_ours,
    num_theirs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from library_modules import CASES, X, loss
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.bench import small_models
from jax_tcgemm.problem.call_options import CallOptions, Provenance, RoundingsRemoved

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")

# --- which groups there are ---------------------------------------------------------------------


def test_a_layer_is_one_call():
    (eqn,) = equations(layer, *LAYER)
    assert eqn.primitive.name == EPILOGUE
    # The bias as it is, not repeated.
    assert [x.aval.shape for x in eqn.invars] == [(M, K), (K, N), (N,), (M, N)]
    check(layer, *LAYER)


def mlp(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mlp_loss(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def mlp_params(*widths, dtype="float32"):
    return [
        (normal(m, n, seed=m, dtype=dtype) / m**0.5, normal(n, seed=n, dtype=dtype) / 4)
        for m, n in itertools.pairwise(widths)
    ]


def test_a_backward_pass_reads_the_pre_activation():
    def gelu_loss(w, v, x):
        return jnp.sum(jax.nn.gelu(x @ w) @ v)

    x, w, v = normal(M, K), normal(K, N, seed=1), normal(N, 24, seed=2)
    forward, backward = groups(jax.grad(gelu_loss, (0, 1)), w, v, x)
    # The activation, and z, of which the backward pass makes the derivative itself.
    assert [x.aval.shape for x in forward.outvars] == [(M, N)] * 2
    assert len(backward.invars) == 3
    assert backward.invars[2] in forward.outvars
    assert "tanh" in names(backward.params["function"])
    assert [x.aval.shape for x in backward.outvars] == [(M, N)]
    check(jax.grad(gelu_loss, (0, 1)), w, v, x)


def test_a_derivative_of_what_is_stored_reads_that():
    """tanh' is a function of tanh, which the next product reads: nothing more is stored."""
    params, x, y = mlp_params(8, 16, 4), normal(M, 8), normal(M, 4)
    forward, *_, backward = groups(jax.grad(mlp_loss), params, x, y)
    assert len(forward.outvars) == 1
    assert backward.invars[2] is forward.outvars[0]


def test_two_products_that_use_each_other_make_no_circle():
    def crossed(x, w, v):
        a = jnp.sin(x @ w)
        b = jnp.cos(a @ v)
        c = a * b
        return (c + b) @ w, a + c

    x, w = normal(8, 8), normal(8, 8, seed=1)
    check(crossed, x, w, w.T)
    check_every_product(crossed, x, w, w.T)
    first, second, *_ = groups(crossed, x, w, w.T)
    assert first.outvars[0] in second.invars


def test_what_comes_after_a_use_of_the_result_stays_outside():
    def normed(x, w):
        z = jax.nn.silu(x @ w)
        return z / jnp.sum(z, -1, keepdims=True), z

    (eqn,) = groups(normed, normal(M, K), normal(K, N))
    assert "div" not in names(eqn.params["function"])
    check(normed, normal(M, K), normal(K, N))


def test_softmax_alone_has_no_epilogue():
    """XLA computes a scale and a mask on its way, so that nothing is gained by storing them."""

    def attention(q, k):
        return jax.nn.softmax(jnp.where(jnp.tri(M, dtype=bool), q @ k.mT / 4, -1e9), -1)

    args = normal(3, 4, M, K), normal(3, 4, M, K, seed=1)
    assert not groups(attention, *args)
    check_every_product(attention, *args)
    check(attention, *args)


def test_what_only_loops_of_xla_read_is_not_stored():
    """The gradient is stored as the product gives it, not its square, and not in float32."""

    def clipped(x, w):
        g = (x.mT @ w).astype(jnp.float32)
        return g / jnp.sqrt(jnp.sum(g**2 + jnp.zeros_like(g)))

    args = normal(K, M, dtype="bfloat16"), normal(K, N, dtype="bfloat16")
    assert not groups(clipped, *args)
    check(clipped, *args, tolerance=2**-7)


def test_conversions_to_wider_dtypes_are_made_again_for_others():
    def f(x, w):
        z = (x @ w).astype(jnp.float32)
        y = jnp.sin(z).astype(jnp.bfloat16)
        return y @ w.T, z / jnp.sum(z**2)

    args = normal(M, K, dtype="bfloat16"), normal(K, N, dtype="bfloat16")
    (eqn,) = groups(f, *args)
    assert [x.aval.dtype for x in eqn.outvars] == [jnp.bfloat16] * 2
    check(f, *args, tolerance=2**-6)
    check_every_product(f, *args)


def test_arrays_of_one_number_cost_what_is_computed_again_nothing():
    """The slope of a minimum, which loops make of the product that they read."""

    def f(x, w):
        z = x @ w
        low = jnp.minimum(z, 1)
        slope = jnp.where(z == low, 1.0, 0.0) / jnp.where(low == 1, 2.0, 1.0)
        return jnp.sin(low) @ w.T, slope * jnp.cos(z) * jnp.cumsum(z, 0)

    args = normal(M, K), normal(K, N)
    (eqn,) = groups(f, *args)
    assert names(eqn.params["function"]) == ["min", "sin"]
    check(f, *args)
    check_every_product(f, *args)


def test_what_is_computed_again_needs_nothing_that_comes_later():
    """The factor is made of numbers, but after the first use of the product."""

    def f(x, w):
        z = x @ w
        total = jnp.cumsum(z, 0)
        factor = jnp.full(z.shape, 3.0) * jnp.full(z.shape, 0.5)
        y = jnp.sin(z).astype(jnp.float32) * factor
        return total, jnp.cos(y) @ w.T, y / jnp.sum(y**2)

    args = normal(M, K), normal(K, N)
    check(f, *args)
    check_every_product(f, *args)
    assert len(groups(f, *args)) == 1


def test_a_sum_that_is_read_twice_is_stored():
    """A norm reads its input twice, and so it would both parts of the sum."""

    def f(x, w, residual):
        y = residual + x @ w
        return y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True))

    args = normal(M, K), normal(K, N), normal(M, N)
    assert len(groups(f, *args)) == 1
    check(f, *args)


def test_transpositions_are_parts_of_products():
    def f(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.sin(jnp.swapaxes(x, 0, 1) @ w)))(w).T

    args = normal(K, M), normal(K, N)
    assert "transpose" not in [eqn.primitive.name for eqn in equations(f, *args)]
    check(f, *args)

    def chained(a, b, c):
        return jnp.einsum("ahb,bc->cha", a, b).transpose(1, 0, 2) @ c.T

    args = normal(3, 4, 5), normal(5, 6), normal(2, 3)
    check(chained, *args)
    check_every_product(chained, *args)


def test_limits_of_kernels_are_kept():
    def many(x, w, *others):
        return list(itertools.accumulate(others, lambda y, z: jnp.sin(y) * z, initial=x @ w))[10::2]

    others = [normal(M, N, seed=i) for i in range(20)]
    args = normal(M, K), normal(K, N), *others
    (eqn,) = groups(many, *args)
    assert len(eqn.invars) == 2 + 12
    assert len(eqn.outvars) == 2
    check(many, *args)

    def results(x, w):
        z = x @ w
        return [jnp.sin(z * i) for i in range(10)]

    (eqn,) = groups(results, *args[:2])
    assert len(eqn.outvars) <= 6
    # The sine of up to 9 z has nine times its rounding.
    check(results, *args[:2], tolerance=1e-4)


def test_layers_that_are_alike_share_a_function():
    params = mlp_params(8, 8, 8, 8, 8)
    found = groups(jax.grad(mlp_loss), params, normal(M, 8), normal(M, 8))
    functions = [eqn.params["function"] for eqn in found]
    assert len({id(x) for x in functions[:3]}) == 1
    assert len({id(x) for x in functions}) < len(functions)


def test_nothing_is_rewritten_without_products():
    def f(x):
        return lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)

    before, after = (str(jax.make_jaxpr(g)(X)) for g in (f, jax_tcgemm.accelerate(f)))
    assert before == after


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_training_step(dtype, x64):
    params = mlp_params(8, 16, 16, 4, dtype=dtype)
    x, y = normal(M, 8, dtype=dtype), normal(M, 4, dtype=dtype)

    def step(params, x, y):
        value, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    # Sums differ in their order at most; every rounding to 16 bits is where it was.
    tolerance = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    check(step, params, x, y, tolerance=tolerance)
    check_every_product(step, params, x, y)


def test_roundings_stay_where_they_are():
    """Of sums that are exact in any order nothing but roundings is left to differ."""
    rng = np.random.default_rng(0)
    x, w, b = (
        jnp.asarray(rng.integers(-8, 9, shape) / 8, jnp.bfloat16)
        for shape in ((M, K), (K, N), (N,))
    )

    def f(x, w, b):
        return jax.value_and_grad(lambda w: jnp.sum(jax.nn.gelu(x @ w + b) ** 2))(w)

    check(lambda *args: jax.nn.gelu(args[0] @ args[1] + args[2]), x, w, b, exact=True)
    check(f, x, w, b, tolerance=2**-7)


def test_wide_leaves_out_roundings():
    rng = np.random.default_rng(0)
    x, w, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((M, K), (K, N), (N,))
    )

    def f(x, w, b):
        return jnp.tanh((x @ w + b) / 8) + 1

    (eqn,) = groups(f, x, w, b, wide=True)
    assert eqn.params["options"].diagnostics == (RoundingsRemoved(4),)
    exact = np.tanh((np.asarray(x, "f8") @ np.asarray(w, "f8") + np.asarray(b, "f8")) / 8) + 1
    got = jax_tcgemm.accelerate(f, wide=True)(x, w, b)
    assert got.dtype == jnp.bfloat16
    # Rounded once.
    np.testing.assert_allclose(np.asarray(got, "f8"), exact, rtol=2**-8, atol=1e-5)
    plain = np.asarray(f(x, w, b), "f8")
    assert abs(plain - exact).max() > abs(np.asarray(got, "f8") - exact).max()
    (eqn,) = groups(f, *(y.astype(jnp.float32) for y in (x, w, b)), wide=True)
    assert eqn.params["options"] == CallOptions("accelerate", provenance=Provenance.ACCELERATED)


MODELS = {model.name: model for model in small_models.models()}


@pytest.mark.parametrize("name", MODELS)
def test_small_models(name):
    model = MODELS[name]
    check(model.step, *model.carry, tolerance=2e-2 if "bfloat16" in name else 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_libraries(name):
    """Stock modules of Flax, Equinox and Haiku, and their gradients."""
    make, *_ = CASES[name]
    theirs, _, parameters = make()
    check(theirs, parameters, X, tolerance=1e-4)
    step = jax.value_and_grad(loss(theirs), (0, 1))
    check(step, parameters, X, tolerance=1e-3)
    check_every_product(step, parameters, X)


def test_a_mixture_of_experts_of_einsums():
    def layer(params, x):
        router, up, down = params
        gates = jax.nn.softmax(jnp.einsum("td,de->te", x, router))
        h = jax.nn.silu(jnp.einsum("td,edf->etf", x, up))
        return jnp.einsum("etf,efd,te->td", h, down, gates)

    params = normal(8, 4), normal(4, 8, 16), normal(4, 16, 8, seed=1)
    step = jax.value_and_grad(lambda p, x: jnp.sum(layer(p, x) ** 2))
    check(step, params, normal(M, 8), tolerance=1e-4)
    check_every_product(step, params, normal(M, 8))


def test_dropout():
    """Its mask is an operand, and the same in the backward pass."""

    def step(key, x, w, v):
        def loss(w):
            y = jax.nn.relu(x @ w)
            kept = jax.random.bernoulli(key, 0.75, y.shape)
            return jnp.sum((jnp.where(kept, y / 0.75, 0) @ v) ** 2)

        return jax.value_and_grad(loss)(w)

    args = jax.random.key(1), normal(M, K), normal(K, N), normal(N, 8)
    check(step, *args, tolerance=1e-4)
    check_every_product(step, *args)
    forward, _, backward = groups(step, *args)
    # Both read it, or the second one what the first one has made of it.
    assert "bool" in [str(x.aval.dtype) for x in forward.invars]
    assert "bool" in [str(x.aval.dtype) for x in backward.invars]


def test_a_step_of_adam():
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = mlp_params(8, 16, 4)

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, optimizer.init(params), normal(M, 8), normal(M, 4)
    check(step, *args, tolerance=1e-4)
    check_every_product(step, *args)


def test_integers_and_what_no_kernel_knows():
    a = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (8, 8)), jnp.int8)

    def quantized(a, scale):
        z = lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return jnp.round(z * scale).astype(jnp.int8)

    check(quantized, a, jnp.float32(0.01), exact=True)
    assert len(groups(quantized, a, jnp.float32(0.01))) == 1
    c = normal(4, 4, dtype="complex64")
    check(lambda c: jnp.abs(c @ c) + 1, c)
    check(lambda a: a.astype(jnp.int32) @ a.astype(jnp.int32) + 1, a, exact=True)


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_that_are_no_arrays():
    def f(x, *, power, name, flags):
        assert isinstance(power, int)
        return {"out": (x @ x) ** power, "name": name, "none": None} if flags["on"] else x

    x = normal(4, 4)
    fast = jax_tcgemm.accelerate(f)
    for power in (2, 3):
        got = fast(x, power=power, name="n", flags={"on": True})
        np.testing.assert_allclose(got["out"], (x @ x) ** power, rtol=1e-5)
        assert got["name"] == "n"
    assert fast(x, power=2, name=[], flags={"on": False}) is not None
    assert fast.__name__ == "f"


def test_closed_over_arrays():
    w = normal(4, 4)

    @jax.jit
    def outer(w, x):
        return jax_tcgemm.accelerate(lambda x: jnp.sin(x @ w))(x)

    np.testing.assert_allclose(outer(w, w), jnp.sin(w @ w), rtol=1e-5, atol=1e-6)
    got, expected = (
        jax.grad(lambda v: jnp.sum(how(lambda x: jnp.sin(x @ v))(w)))(w)  # noqa: B023
        for how in (jax_tcgemm.accelerate, lambda f: f)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_program_is_traced_once():
    traces = []

    def f(x, scale):
        traces.append(scale)
        return scale * (x @ x)

    fast = jax_tcgemm.accelerate(f)
    x = normal(4, 4)
    for _ in range(2):
        fast(x, 2)
    assert traces == [2]
    fast(x, 2.0)
    fast(x, 3)
    fast(x[:2, :2], 3)
    assert traces == [2, 2.0, 3, 3]
    with jax.default_matmul_precision("highest"):
        fast(x, 3)
    assert len(traces) == 5


def test_errors():
    with pytest.raises(TypeError, match="accelerate: fn must be a function, got fn of type int"):
        jax_tcgemm.accelerate(3)
    with pytest.raises(TypeError, match="accelerate: wide must be True or False"):
        jax_tcgemm.accelerate(layer, wide=1)


# --- random programs ------------------------------------------------------------------------------

_UNARY = (
    jnp.sin,
    jnp.tanh,
    jax.nn.gelu,
    jax.nn.relu,
    lambda x: jnp.where(x > 0, x, 0.5 * x),
    jnp.abs,
)
_BINARY = (jnp.add, jnp.multiply, jnp.maximum, lambda x, y: x - 0.5 * y)


_KINDS = ["product", "gate", "stacked", "unary", "binary", "norm", "reduction", "transpose"]


@st.composite
def programs(draw):
    """Steps on square matrices, each of earlier ones: products, elementwise ones and reductions."""
    steps = []
    for number in range(draw(st.integers(2, 12))):
        earlier = st.integers(0, number + 1)
        kind = draw(st.sampled_from(_KINDS))
        which = draw(st.integers(0, 5))
        steps.append((kind, which, draw(earlier), draw(earlier)))
    results = draw(st.lists(st.integers(0, len(steps) + 1), min_size=1, max_size=3))
    return steps, results, draw(st.booleans())


def run_program(steps, results, x, y):
    values = [x, y]
    for kind, which, i, j in steps:
        a, b = values[i], values[j]
        if kind == "product":
            made = (a @ b) / 4
        elif kind == "gate":
            made = _BINARY[which % 4](_UNARY[which](a @ b / 4), a @ (b - a) / 4)
        elif kind == "stacked":
            gate, up = jnp.split(a @ jnp.concatenate([b, a.T], 1) / 4 + y[0, 0], 2, -1)
            made = _BINARY[which % 4](_UNARY[which](gate), up)
        elif kind == "reduction":
            made = jnp.sin(a) + (jnp.sum, jnp.max)[which % 2](abs(b), which // 3, keepdims=True)
        elif kind == "unary":
            made = _UNARY[which](a)
        elif kind == "binary":
            made = _BINARY[which % 4](a, b)
        elif kind == "norm":
            made = a / (1 + jnp.sum(b**2, -1, keepdims=True))
        else:
            made = a.T
        values.append(made)
    return [values[i] for i in results]


@settings(max_examples=40, deadline=None)
@given(programs())
def test_random_programs(program):
    steps, results, is_differentiated = program
    f = functools.partial(run_program, steps, results)
    if is_differentiated:
        f = jax.grad(lambda x, y, f=f: sum(jnp.sum(jnp.tanh(z)) for z in f(x, y)), (0, 1))
    args = normal(6, 6), normal(6, 6, seed=1)
    before, after = (str(jax.make_jaxpr(g)(*args)) for g in (f, jax_tcgemm.accelerate(f)))
    assert num_ours(after) == num_theirs(before)
    expected = jax.jit(f)(*args)
    got = jax.jit(jax_tcgemm.accelerate(f))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * scale)


# --- what programs are kept by ------------------------------------------------------------------


def test_numbers_that_are_equal_but_not_the_same():
    """Zeros of both signs, one and True in three dtypes, and NaN."""

    @dataclasses.dataclass(frozen=True)
    class Factor:
        number: float

    x, w = normal(4, 8), normal(8, 4, seed=1)
    fast = jax_tcgemm.accelerate(lambda x, c: (x @ w) * getattr(c, "number", c))
    plain = lambda x, c: (x @ w) * getattr(c, "number", c)  # noqa: E731
    numbers = 0.0, -0.0, 1, True, 1.0, 0j, complex(-0.0, -0.0), float("nan")
    for c in (*numbers, Factor(0.0), Factor(-0.0)):
        got, expected = fast(x, c), plain(x, c)
        assert (got.dtype, got.weak_type) == (expected.dtype, expected.weak_type), c
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        for part in (np.real, np.imag):
            own, other = (np.signbit(part(np.asarray(y))) for y in (got, expected))
            np.testing.assert_array_equal(own, other, err_msg=repr(c))


def test_programs_of_nan_are_kept():
    traces = []

    def f(x, c):
        traces.append(c)
        return x @ x * c

    fast, x = jax_tcgemm.accelerate(f), normal(4, 4)
    for _ in range(3):
        assert jnp.isnan(fast(x, float("nan"))).all()
    assert len(traces) == 1
