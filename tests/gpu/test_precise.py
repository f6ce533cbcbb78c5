"""Products of parts on a GPU: errors by data, preset and implementation, and every kind of call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precise_cases import KINDS, LEFT_OUT, PRESETS, exact, excess, operands
from random_arrays import normal, widened

import jax_tcgemm
from jax_tcgemm import tensor

pytestmark = pytest.mark.gpu

X3, X6, X9, TF32 = PRESETS
# The tensor core truncates as it adds.
ADDING = 24 * 2.0**-24


def product(a, b, preset, **how):
    return jax.jit(functools.partial(jax_tcgemm.matmul, precision=preset, **how))(a, b)


def allowed(kind):
    return ADDING * (20 if kind == "positive" else 1)


@pytest.mark.parametrize("implementation", [None, "cublaslt", "mma_sync", "xla"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_errors(dtype, kind, preset, implementation):
    a, b = operands(kind, 133, 72, 700, dtype)
    got = product(a, b, preset, implementation=implementation)
    assert got.dtype == dtype
    assert excess(got, a, b, preset, allowed(kind)) <= 1


@pytest.mark.parametrize("shape", [(128, 256, 512), (333, 777, 1111), (1, 512, 4096), (64, 7, 33)])
@pytest.mark.parametrize("preset", PRESETS)
def test_shapes(shape, preset):
    a, b = operands("normal", *shape)
    assert excess(product(a, b, preset), a, b, preset, ADDING) <= 1


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_presets_differ_as_they_say(dtype):
    a, b = operands("normal", 256, 256, 512, dtype)
    reference, magnitude = exact(a, b)

    def error(precision):
        return (abs(widened(product(a, b, precision)) - reference) / magnitude).max()

    assert error("default") > 10 * error(X3) > 20 * error(X6)
    assert error(X9) < 2 * error(X6)
    assert error(TF32) < error(X3)
    # XLA may not have simplified what was rounded away.
    assert error(X6) < 4e-7


@pytest.mark.parametrize("kind", ["normal", "positive", "ill-conditioned"])
@pytest.mark.parametrize("k", [512, 4096, 16384, 65536])
def test_long_sums_are_as_precise_as_float32(k, kind):
    """Accumulators of X9 are promoted: the tensor core alone would be 2 to 5 times further off."""
    a, b = operands(kind, 256, 256, k)
    reference, magnitude = exact(a, b)

    def error(precision):
        return (abs(widened(product(a, b, precision)) - reference) / magnitude).max()

    assert error(X9) <= 1.25 * error("highest")


@pytest.mark.parametrize("preset", PRESETS)
def test_infinities_and_nans(preset):
    a, b = (np.array(x) for x in operands("normal", 64, 64, 128))
    a[0, 3], a[1, 4], a[2, :2], a[9, 6] = np.inf, np.nan, (np.inf, -np.inf), 2.0
    b[5, 1], b[6, 2] = -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = np.stack([sum(x * y for x, y in zip(row, b, strict=True)) for row in a])
    got = np.asarray(product(jnp.asarray(a), jnp.asarray(b), preset))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])


@pytest.mark.parametrize("preset", PRESETS)
def test_derivatives(preset):
    a, b = operands("normal", 130, 72, 300)
    g = normal(130, 72, seed=7)
    a_bar, b_bar = jax.vjp(lambda a, b: product(a, b, preset), a, b)[1](g)
    assert excess(a_bar, g, b.T, preset, ADDING) <= 1
    assert excess(b_bar, a.T, g, preset, ADDING) <= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_layers_and_functions(preset):
    x, w = operands("normal", 128, 256, 512)
    reference, magnitude = exact(x, w)
    limit = (LEFT_OUT[preset] + ADDING) * magnitude + 1e-6 * abs(reference) + 1e-6
    y = jax.jit(
        lambda x, w: jax_tcgemm.linear(x, w, jnp.ones(256), activation="relu", precision=preset)
    )(x, w)
    assert (abs(widened(y) - np.maximum(reference + 1, 0)) <= limit).all()

    def function(acc):
        return 3 * acc + 1, acc.max(-1)

    y, largest = product(x, w, preset, epilogue=function)
    assert (abs(widened(y) - (3 * reference + 1)) <= 3 * limit).all()
    assert (abs(widened(largest) - reference.max(-1)) <= limit.max(-1)).all()


@pytest.mark.parametrize("is_stacked", [False, True])
def test_gated_functions(is_stacked):
    """Of both layouts of weights: in one array, and a pair of arrays."""
    x, weights = normal(128, 256), normal(256, 2, 128, seed=1)
    gate, up = weights[:, 0], weights[:, 1]
    how = {"precision": X6, "epilogue": lambda g, u: jnp.maximum(g, 0) * u}
    given = weights if is_stacked else (gate, up)
    y = jax.jit(lambda x, w: jax_tcgemm.gated_linear(x, w, **how))(x, given)
    (first, first_size), (second, second_size) = exact(x, gate), exact(x, up)
    limit = (2.0**-24 + ADDING) * (first_size * abs(second) + second_size * abs(first)) + 1e-5
    assert (abs(widened(y) - np.maximum(first, 0) * second) <= limit).all()


def test_matrices_one_after_the_other():
    x, weights = normal(128, 256), normal(2, 256, 128, seed=1)

    def f(x, weights):
        both = jax_tcgemm.dot_general(
            x, weights, (((1,), (1,)), ((), ())), X6, epilogue=lambda acc: acc * 2
        )
        return both[:, 0] * both[:, 1]

    got = jax.jit(f)(x, weights)
    (first, first_size), (second, second_size) = (exact(x, w) for w in weights)
    limit = 4 * (2.0**-24 + ADDING) * (first_size * abs(second) + second_size * abs(first)) + 1e-5
    assert (abs(widened(got) - 4 * first * second) <= limit).all()


# Rows that a kernel splits, of tokens, of matrices, and neither, which XLA does.
@pytest.mark.parametrize(("k", "n"), [(256, 128), (256, 130), (250, 128), (250, 130)])
@pytest.mark.parametrize("preset", PRESETS)
def test_grouped_products(preset, k, n):
    x, w, g = normal(600, k), normal(4, k, n, seed=1), normal(600, n, seed=2)
    sizes = np.array([100, 0, 350, 130])
    f = jax.jit(lambda x, w: jax_tcgemm.ragged_dot(x, w, jnp.asarray(sizes), precision=preset))
    y, vjp = jax.vjp(f, x, w)
    x_bar, w_bar = vjp(g)
    ends = np.cumsum(sizes)
    for group, (first, last) in enumerate(zip(ends - sizes, ends, strict=True)):
        own = slice(int(first), int(last))
        if first == last:
            np.testing.assert_array_equal(w_bar[group], 0)
            continue
        assert excess(y[own], x[own], w[group], preset, ADDING) <= 1
        assert excess(x_bar[own], g[own], w[group].T, preset, ADDING) <= 1
        assert excess(w_bar[group], x[own].T, g[own], preset, 2 * ADDING) <= 1


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("form", ["swapped", "gated", "batches"])
def test_operands_of_groups(form, is_gathered):
    """As with the parts of each operand made by XLA, which a CPU does."""
    shapes = {"swapped": (4, 96, 256), "gated": (4, 256, 2, 96), "batches": (2, 4, 256, 96)}
    x, w = normal(600, 256), normal(*shapes[form], seed=1) / 16
    sizes, rows = jnp.array([100, 0, 350, 150]), None
    if is_gathered:
        rows = jnp.asarray(np.random.default_rng(0).permutation(600), jnp.int32)

    def product(x, w, implementation=None):
        how = {"precision": X6, "gather_indices": rows, "implementation": implementation}
        if form == "gated":
            return jax_tcgemm.gated_ragged_linear(x, w, sizes, **how)
        return jax_tcgemm.ragged_dot(x, w.mT if form == "swapped" else w, sizes, **how)

    if form == "batches":
        mapped, product = product, lambda x, w, *how: jax.vmap(lambda w: mapped(x, w, *how))(w)
    got = jax.jit(product)(x, w)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = product(*(jnp.asarray(np.asarray(a)) for a in (x, w)), "xla")
    np.testing.assert_allclose(got, np.asarray(expected), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("subscripts", ["bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"])
def test_contractions(subscripts, dtype):
    a_shape = (2, 64, 4, 48) if subscripts.startswith("bqhd") else (2, 4, 64, 80)
    a, b = normal(*a_shape, dtype=dtype), normal(2, 80, 4, 48, seed=1, dtype=dtype)
    got = jax.jit(functools.partial(tensor.einsum, subscripts, precision=X6))(a, b)
    expected = np.einsum(subscripts, widened(a), widened(b))
    magnitude = np.einsum(subscripts, abs(widened(a)), abs(widened(b)))
    assert (abs(widened(got) - expected) <= (2.0**-24 + ADDING) * magnitude).all()
