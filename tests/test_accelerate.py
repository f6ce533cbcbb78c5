"""`accelerate`: which equations go with which product, and that programs compute what they did."""

import functools
import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import (
    EPILOGUE,
    check,
    check_every_product,
    equations,
    groups,
    names,
    num_ours,
    num_theirs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from library_modules import CASES, X, loss
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench import small_models
from jax_tcgemm.selection import tables

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")

# --- which groups there are ---------------------------------------------------------------------

M, K, N = 12, 20, 16


def layer(x, w, bias, residual):
    return residual + jax.nn.gelu(x @ w + bias)


LAYER = normal(M, K), normal(K, N, seed=1), normal(N, seed=2), normal(M, N, seed=3)


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
    assert eqn.params["op"] == "accelerate, 4 roundings left out"
    exact = np.tanh((np.asarray(x, "f8") @ np.asarray(w, "f8") + np.asarray(b, "f8")) / 8) + 1
    got = jax_tcgemm.accelerate(f, wide=True)(x, w, b)
    assert got.dtype == jnp.bfloat16
    # Rounded once.
    np.testing.assert_allclose(np.asarray(got, "f8"), exact, rtol=2**-8, atol=1e-5)
    plain = np.asarray(f(x, w, b), "f8")
    assert abs(plain - exact).max() > abs(np.asarray(got, "f8") - exact).max()
    (eqn,) = groups(f, *(y.astype(jnp.float32) for y in (x, w, b)), wide=True)
    assert eqn.params["op"] == "accelerate"


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

    def quantised(a, scale):
        z = lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return jnp.round(z * scale).astype(jnp.int8)

    check(quantised, a, jnp.float32(0.01), exact=True)
    assert len(groups(quantised, a, jnp.float32(0.01))) == 1
    c = normal(4, 4, dtype="complex64")
    check(lambda c: jnp.abs(c @ c) + 1, c)
    check(lambda a: a.astype(jnp.int32) @ a.astype(jnp.int32) + 1, a, exact=True)


# --- other programs inside ------------------------------------------------------------------------


def test_control_flow():
    w = normal(8, 8) / 4

    def scanned(x, w):
        def body(x, w):
            return x + jnp.tanh(x @ w), jnp.sum(x)

        return lax.scan(body, x, w)

    def looped(x, w):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] @ w)), (0, x))

    def branched(x, w):
        return lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: x)

    x, ws = normal(4, 8), jnp.stack([w, w.T, w])
    for f, args in ((scanned, (x, ws)), (looped, (x, w)), (branched, (x, w))):
        check(f, *args)
        check_every_product(f, *args)
        assert EPILOGUE in str(jax.make_jaxpr(jax_tcgemm.accelerate(f))(*args))
    step = jax.value_and_grad(lambda ws: jnp.sum(scanned(x, ws)[0] ** 2))
    check(step, ws, tolerance=1e-4)
    check_every_product(step, ws)


def test_remat():
    block = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w))

    def f(x, w):
        return jnp.sum(block(block(x, w), w) ** 2)

    x, w = normal(4, 8), normal(8, 8) / 4
    for g in (f, jax.value_and_grad(f, (0, 1))):
        check(g, x, w)
        check_every_product(g, x, w)
    policy = jax.checkpoint_policies.dots_saveable

    def saved(x, w):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)), policy=policy)(x, w))

    # A policy still sees the primitives that it knows.
    check(saved, x, w)
    inside = str(jax.make_jaxpr(jax.grad(jax_tcgemm.accelerate(saved)))(x, w))
    outside = str(jax.make_jaxpr(jax.grad(saved))(x, w))
    assert num_theirs(inside) == num_theirs(outside)


@jax.custom_vjp
def doubling(x, w):
    return jnp.sin(x @ w)


doubling.defvjp(
    lambda x, w: (jnp.sin(x @ w), (x, w)),
    lambda kept, g: (2 * g @ kept[1].T, 2 * kept[0].T @ g),
)


@jax.custom_jvp
def halving(x, w):
    return jnp.sin(x @ w)


halving.defjvp(lambda primals, tangents: (halving(*primals), 0.5 * tangents[0] @ primals[1]))


@pytest.mark.parametrize("f", [doubling, halving])
def test_functions_with_derivatives_of_their_own(f):
    x, w = normal(4, 8), normal(8, 8)
    check(f, x, w)
    check_every_product(f, x, w)

    def total(x, w):
        return jnp.sum(f(x, w) ** 2)

    check(jax.grad(total), x, w)
    check_every_product(jax.grad(total), x, w)
    # And where it is differentiated afterwards.
    np.testing.assert_allclose(
        jax.grad(jax_tcgemm.accelerate(total))(x, w), jax.grad(total)(x, w), rtol=1e-5, atol=1e-5
    )


@jax.custom_vjp
def scaled_gelu(x, w, scale):
    return jax.nn.gelu(x @ w) * scale


def scaled_gelu_forward(x, w, scale):
    z = x @ w
    return jax.nn.gelu(z) * scale, (x, w, z, scale)


def scaled_gelu_backward(kept, g):
    x, w, z, scale = kept
    dz = jax.vjp(jax.nn.gelu, z)[1](g * scale)[0]
    return jnp.tanh(dz @ w.T), x.T @ dz, None


scaled_gelu.defvjp(scaled_gelu_forward, scaled_gelu_backward)


def test_derivatives_that_are_taken_later_are_accelerated():
    args = normal(4, 8), normal(8, 8), 2.0

    def total(x, w, scale):
        return jnp.sum(scaled_gelu(x, w, scale) ** 2)

    gradient = jax.grad(jax_tcgemm.accelerate(total), (0, 1))
    for run in (gradient, jax.jit(gradient)):
        got, expected = run(*args), jax.grad(total, (0, 1))(*args)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * abs(b).max())
    text = str(jax.make_jaxpr(gradient)(*args))
    assert not num_theirs(text)
    # Gelu and its argument of the first one, tanh of the gradient of x.
    assert text.count(f" {EPILOGUE}[") == 2
    second = jax.grad(lambda x, w: jnp.sum(gradient(x, w, 2.0)[0] ** 2), (0, 1))(*args[:2])
    expected = jax.grad(lambda x, w: jnp.sum(jax.grad(total)(x, w, 2.0) ** 2), (0, 1))(*args[:2])
    for a, b in zip(second, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())


def test_activations_keep_their_derivatives():
    """relu has half of none of it at zero."""

    def f(x, w):
        return jnp.sum(jax.nn.relu(x @ w))

    x, w = jnp.zeros((4, 8)), normal(8, 8)
    (eqn,) = groups(lambda x, w: jax.nn.relu(x @ w), x, w)
    assert names(eqn.params["function"]) == ["custom_jvp_call"]
    got = jax.grad(jax_tcgemm.accelerate(f))(x, w)
    np.testing.assert_array_equal(got, jax.grad(f)(x, w))


def test_transformations_around_it():
    fast = jax_tcgemm.accelerate(layer)
    x, w, bias, residual = LAYER
    for argnums in (0, 1, 2, 3):
        got, expected = (
            jax.grad(lambda *args, f=f: jnp.sum(f(*args) ** 2), argnums)(*LAYER)
            for f in (fast, layer)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    stacked = jnp.stack([x, 2 * x])
    for f in (jax.vmap, lambda f, *how: jax.jit(jax.vmap(f, *how))):
        got, expected = (
            f(g, (0, None, None, None))(stacked, w, bias, residual) for g in (fast, layer)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    got, expected = (jax.jvp(f, LAYER, LAYER) for f in (fast, layer))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)
    check(lambda *args: fast(*args) + 1, *LAYER)  # and inside of itself
    check(jax.jit(layer), *LAYER)
    check(jax.vmap(layer, (0, None, None, None)), stacked, w, bias, residual)


def test_donation_is_kept():
    @functools.partial(jax.jit, donate_argnums=0)
    def inner(x, w):
        return jnp.sin(x @ w)

    x, w = normal(8, 8), normal(8, 8)
    (eqn,) = equations(inner, x, w)
    assert eqn.primitive.name == "jit"
    assert eqn.params["donated_invars"] == (True, False)
    assert eqn.params["name"] == "inner"


def test_effects_stay_as_they_are():
    seen = []

    def f(x, w):
        jax.debug.callback(lambda x: seen.append(("before", float(x))), x[0, 0], ordered=True)
        z = x @ w
        y = jnp.sin(z)
        jax.debug.callback(lambda z: seen.append(("between", float(z))), z[0, 0], ordered=True)
        out = y @ w + 1
        jax.debug.callback(lambda z: seen.append(("after", float(z))), out[0, 0], ordered=True)
        return out

    x = jnp.eye(4)
    check(f, x, x)
    jax.effects_barrier()
    assert len(seen) == 9
    assert seen[:3] == seen[3:6] == seen[6:]
    assert [name for name, _ in seen[:3]] == ["before", "between", "after"]


def test_ragged_products():
    sizes = jnp.array([2, 4], jnp.int32)

    def f(x, w):
        return jnp.sum(jax.nn.relu(lax.ragged_dot(x, w, sizes)) ** 2)

    args = normal(6, 5), normal(2, 5, 4)
    for g in (f, jax.grad(f, (0, 1))):
        check(g, *args, tolerance=1e-4)
        text = str(jax.make_jaxpr(jax_tcgemm.accelerate(g))(*args))
        assert "tcgemm_ragged_dot" in text
        assert " ragged_dot_general[" not in text


# --- several devices ------------------------------------------------------------------------------


def mesh_of(axis_type):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_programs(axis_type):
    mesh = mesh_of(axis_type)
    specs = P("x"), P(None, "y"), P("y"), P("x", "y")
    args = [normal(8, 16), normal(16, 8), normal(8), normal(8, 8)]
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        expected, got = (jax.jit(f)(*args) for f in (layer, jax_tcgemm.accelerate(layer)))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert got.sharding.is_equivalent_to(expected.sharding, 2)
        assert len(groups(layer, *args)) == 1


def test_gradients_over_explicit_axes():
    mesh = mesh_of(AxisType.Explicit)
    specs = P("x"), P(None, "y"), P("y")
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(normal(*shape), NamedSharding(mesh, spec))
            for shape, spec in zip(((8, 16), (16, 8), (8, 4)), specs, strict=True)
        ]
        x, w, v = args

        def f(x, w, v):
            y = jnp.tanh(jnp.einsum("ik,kj->ij", x, w, out_sharding=P("x", "y")))
            return jnp.einsum("ij,jk->ik", y, v, out_sharding=P("x"))

        step = jax.grad(lambda x, w, v: jnp.sum(f(x, w, v) ** 2), (0, 1, 2))
        expected, got = (jax.jit(g)(x, w, v) for g in (step, jax_tcgemm.accelerate(step)))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
            assert a.sharding.is_equivalent_to(b.sharding, 2)
        assert len(groups(step, x, w, v)) >= 2


def test_export_with_symbolic_dimensions():
    (rows,) = jax.export.symbolic_shape("rows")
    accelerated = jax.jit(jax_tcgemm.accelerate(lambda x, w, b: jax.nn.gelu(x @ w + b)))
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, K), (K, N), (N,))]
    exported = jax.export.export(accelerated)(*types)
    args = normal(5, K), normal(K, N), normal(N)
    expected = jax.nn.gelu(args[0] @ args[1] + args[2])
    np.testing.assert_allclose(exported.call(*args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = mesh_of(AxisType.Auto)

    def part(x, w, bias):
        y = jax.nn.gelu(lax.psum(x @ w, "y") + bias)
        return lax.pmean(jnp.sum((y @ w.T) ** 2), ("x", "y"))

    f = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P("x", "y"), P("y"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    args = normal(8, 16), normal(16, 8), normal(8)
    check(f, *args, tolerance=1e-4)
    check_every_product(f, *args)

    def local(x, w, bias):
        return jnp.sin(x @ w + bias)

    g = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=check_vma
    )
    args = normal(8, 16), normal(16, 8), normal(8)
    check(g, *args)
    assert EPILOGUE in str(jax.make_jaxpr(jax_tcgemm.accelerate(g))(*args))
    if check_vma:
        step = jax.grad(lambda *args: jnp.sum(g(*args) ** 2), (0, 1, 2))
        check(step, *args, tolerance=1e-4)


@pytest.mark.parametrize("is_divided", [False, True])
def test_numbers_that_come_after_another_use_of_the_product(is_divided):
    """In a shard_map they are made to vary; arrays that are made of numbers are read."""

    def local(x, w):
        z = x @ w
        return jnp.sort(z, -1), jnp.sin(3 * z), jnp.cos(z * jnp.sin(jnp.full((1, 8), 2.0) + 1))

    f = local
    if is_divided:
        specs = P("x"), P()
        f = jax.shard_map(local, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P("x"))
    check(f, normal(8, 16), normal(16, 8))


# --- what runs as one call ------------------------------------------------------------------------


@pytest.fixture
def modelled(fake_cuda):
    """An H200 whose configs the cost model knows."""
    names = [
        "128x256x64_c1x1x1_co",
        "128x256x64_c2x1x1_co",
        "128x128x64_c1x2x1_pp",
        "64x64x64_c1x1x1_pp",
    ]
    fake_cuda.implementations = lambda: {"wgmma": names, "cublaslt": ["heuristic0"]}
    fake_cuda.rejects["cublaslt"] = "has no functions"


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def biased(x, w, bias):
    return jnp.sin(x @ w + bias)


BIASED = struct(4096, 1024), struct(1024, 4096), struct(4096)


@pytest.fixture(params=["a loop that takes long", "a loop that takes no time"])
def gains(request, modelled, monkeypatch):
    """Whether one call takes less time than two."""
    gains = request.param == "a loop that takes long"
    monkeypatch.setattr(selection, "loop_us", lambda *_: 1000.0 if gains else 0.0)
    return gains


TIMES = r"([\d.]+) us for the product and ([\d.]+) us for its function"


def test_one_call_where_that_should_gain(gains):
    (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(biased), *BIASED, platform="cuda")
    assert call.implementation == ("wgmma" if gains else "xla")
    assert call.why.startswith("unfused: ") == (not gains)
    fused = float(re.search(r"the cost model predicts ([\d.]+) us", call.why)[1])
    product, loop = map(float, re.search(TIMES, call.why).groups())
    assert (fused < product + loop) == gains
    # The product that runs alone is rounded by itself, as the program has it.
    assert "bf16->bf16" in str(call.problem)


def test_predictions_are_of_the_modules_that_there_are(fake_cuda):
    def predicted(config):
        fake_cuda.implementations = lambda: {"wgmma": [config], "cublaslt": ["heuristic0"]}
        fake_cuda.rejects["cublaslt"] = "is not asked"
        selection.forget()
        (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(biased), *BIASED, platform="cuda")
        return float(re.search(TIMES, call.why)[1])

    assert predicted("64x64x64_c1x1x1_pp") > 1.5 * predicted("128x256x64_c2x1x1_co")


def test_what_xla_takes_for_the_rest(modelled):
    """It reads the product and the bias and writes the result, 32 MiB each, at 4.43 TB/s."""
    (call,) = jax_tcgemm.explain(
        jax_tcgemm.accelerate(lambda x, w, bias: x @ w + bias), *BIASED, platform="cuda"
    )
    _, loop = map(float, re.search(TIMES, call.why).groups())
    assert loop == pytest.approx(2.8 + 2 * 4096**2 * 2 / 4.43e6, rel=0.01)


def test_the_same_rule_for_an_epilogue_of_ones_own(gains, monkeypatch):
    def own(x, w, bias, **how):
        return jax_tcgemm.matmul(
            x, w, epilogue=lambda acc, b: jnp.sin(acc + b), epilogue_operands=(bias,), **how
        )

    (call,) = jax_tcgemm.explain(own, *BIASED, platform="cuda")
    assert call.why.startswith("unfused: ") == (not gains)
    forced = functools.partial(own, implementation="wgmma")
    (call,) = jax_tcgemm.explain(forced, *BIASED, platform="cuda")
    assert "unfused" not in call.why
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "wgmma")
    (call,) = jax_tcgemm.explain(own, *BIASED, platform="cuda")
    assert "unfused" not in call.why


def test_what_is_lowered_is_what_is_explained(gains):
    accelerated = jax.jit(jax_tcgemm.accelerate(biased))
    text = accelerated.trace(*BIASED).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @tcgemm_gemm.*|stablehlo.dot_general.*", text)
    assert ("stablehlo.sine" in text) == (not gains)
    (call,) = calls
    assert call.startswith("custom_call") == gains
    # It stores what the program does: no float32 product is written for it.
    assert "tensor<4096x4096xbf16>" in call
    assert "xf32>" not in call


def test_a_product_stays_xlas_where_nothing_is_known_to_gain(modelled, monkeypatch):
    def choice(*operands):
        product = jax_tcgemm.accelerate(lambda x, w: x @ w)
        (call,) = jax_tcgemm.explain(product, *operands, platform="cuda")
        return call

    aligned, odd = (
        (struct(4096, 1000), struct(1000, 4096)),
        (struct(4096, 1001), struct(1001, 4096)),
    )
    stays = choice(*aligned)
    assert (stays.implementation, stays.why.partition(", which")[0]) == (
        "xla",
        "nothing is known to run it faster than XLA's own product",
    )
    assert choice(*odd).implementation == "wgmma"
    entry = tables.Entry("wgmma", "128x256x64_c2x1x1_co", 100.0, "0.1.0", abi=1)
    monkeypatch.setattr(tables, "lookup", lambda *_: iter([(entry, "a table")]))
    selection.forget()
    assert "measured, 100 us (a table)" in choice(*aligned).why
    monkeypatch.setattr(tables, "lookup", lambda *_: iter([(entry, "shipped table x.json")]))
    selection.forget()
    assert choice(*aligned).implementation == "xla"


def test_explain_names_what_stops_an_epilogue():
    def f(x, w):
        return jax.nn.softmax(x @ w) @ w.T

    report = jax_tcgemm.explain(jax_tcgemm.accelerate(f), normal(M, K), normal(K, N))
    assert [bool(re.search(r"no epilogue: sub\(.*test_accelerate", c.why)) for c in report] == [
        True,
        False,
    ]
    assert "no epilogue" not in report[1].why  # nothing follows
    wide = jax_tcgemm.accelerate(lambda x, w: jnp.sin(jnp.sin(x @ w)), wide=True)
    (call,) = jax_tcgemm.explain(wide, *(normal(M, M, dtype="bfloat16"),) * 2)
    assert call.why.endswith("; 2 roundings left out")


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


_KINDS = ["product", "gate", "halves", "unary", "binary", "norm", "reduction", "transpose"]


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
        elif kind == "halves":
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


@settings(max_examples=60, deadline=None)
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
