"""Arrays rounded to 8 bits on a GPU: by the definition, and with the bits of XLA's code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantize_cases import LARGEST, Case

import jax_tcgemm
from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.gpu

HOW = {
    "lines": {"block": (1, 128)},
    "blocks": {"block": (128, 128)},
    "rows": {"axis": -1},
    "scaled": {"axis": (-2, -1)},
}
SHAPES = [(1, 256, 512), (2, 300, 272), (3, 131, 70), (1, 1000, 1030), (1, 64, 7168)]
CASES = [
    Case(form, rows, columns, out, x, transposed=transposed, batch=batch, special=rows == 300)
    for form in HOW
    for batch, rows, columns in SHAPES
    for out, x in zip(LARGEST, ("bf16", "f16", "f32"), strict=True)
    for transposed in (False, True)
    if not (form == "rows" and transposed)
]


def quantized(case, implementation):
    how = HOW[case.form] | {"with_transpose": case.transposed}
    f = functools.partial(jax_tcgemm.quantize, dtype=DTYPES[case.out], **how)
    made = jax.jit(functools.partial(f, implementation=implementation))(jnp.asarray(case.array))
    made = made if case.transposed else (made,)
    return [np.asarray(x) for q in made for x in (q.qvalue, q.scale)]


def differing(x, y):
    """How many numbers have other bits, NaN aside."""
    kind = {4: np.uint32, 1: np.uint8}[x.dtype.itemsize]
    found = x.view(kind) != y.view(kind)
    if x.dtype != np.int8:
        found &= ~(np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32)))
    return int(found.sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_bits_of_xla(case):
    for ours, theirs in zip(quantized(case, "quantize"), quantized(case, "xla"), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert differing(ours, theirs) == 0


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.form != "scaled"], ids=lambda case: case.label
)
def test_definition(case):
    """Scales have its bits; of values those may differ that lie in the middle of two numbers.

    There the last bit of a quotient decides, which GPUs divide to without.
    """
    found = quantized(case, "quantize")
    for got, (name, expected) in zip(found, case.exact.items(), strict=True):
        got = got.reshape(expected.shape)
        if name.endswith("scales"):
            assert differing(got, expected) == 0
            continue
        wide = [x.astype(np.float64) for x in (got, expected, case.unrounded[name])]
        is_number = np.isfinite(wide[2]) & (abs(wide[2]) < LARGEST[case.out])
        off, least = (np.where(is_number, abs(x - wide[2]), 0) for x in wide[:2])
        assert (off <= least * (1 + 2.0**-13)).all()
        np.testing.assert_array_equal(
            np.where(is_number, 0, wide[0]), np.where(is_number, 0, wide[1])
        )


@pytest.mark.parametrize("form", HOW)
def test_large_arrays(form):
    """Whose products of extents are no 32-bit integers, and more tiles than run at once."""
    x = jax.random.normal(jax.random.key(0), (65536, 33024), jnp.bfloat16)
    f = functools.partial(jax_tcgemm.quantize, **HOW[form])
    ours, theirs = (
        jax.jit(functools.partial(f, implementation=name))(x) for name in ("quantize", "xla")
    )
    assert bool((ours.qvalue.view(jnp.uint8) == theirs.qvalue.view(jnp.uint8)).all())
    assert bool((ours.scale == theirs.scale).all())


def test_what_is_chosen():
    x = jnp.ones((256, 512), jnp.bfloat16)
    (call,) = jax_tcgemm.explain(lambda x: jax_tcgemm.quantize(x, block=(1, 128)), x)
    assert call.implementation == "quantize"


def test_training_in_8_bits():
    """As on a CPU, where XLA runs all of it."""
    x, w = (jax.random.normal(jax.random.key(i), (512, 512), jnp.bfloat16) for i in range(2))
    for recipe in ("current", "block128"):
        product = jax_tcgemm.Fp8DotGeneral(recipe)
        f = lambda x, w, product=product: product(x, w, (((1,), (0,)), ((), ()))).sum()  # noqa: E731
        gradients = jax.jit(jax.grad(f, (0, 1)))(x, w)
        exact = jax.grad(lambda x, w: (x @ w).sum(), (0, 1))(x, w)
        for got, expected in zip(gradients, exact, strict=True):
            got, expected = (np.asarray(a).astype(np.float64) for a in (got, expected))
            assert np.linalg.norm(got - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", ["current", "block128"])
@pytest.mark.parametrize("hidden", [768, 1000])
def test_blocks_that_train_in_8_bits(recipe, hidden):
    """As on a CPU, where XLA runs all of it."""
    shapes = (512, 512), (512, 2, hidden), (hidden, 512)
    x, up, down = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / shape[0] ** (0.5 * (i > 0))
        for i, shape in enumerate(shapes)
    )

    def loss(f, x, up, down):
        y = f(x, {"up": up, "down": down}, activation="silu", residual=x)
        return jnp.sin(y.astype(jnp.float32)).sum()

    run = jax.value_and_grad(functools.partial(loss, jax_tcgemm.Fp8Mlp(recipe)), (0, 1, 2))
    got, got_gradients = jax.jit(run)(x, up, down)
    exact = jax.value_and_grad(functools.partial(loss, jax_tcgemm.mlp), (0, 1, 2))
    expected, exact_gradients = jax.jit(exact)(x, up, down)
    assert abs(got - expected) < 0.02 * 512 * 512
    for a, b in zip(got_gradients, exact_gradients, strict=True):
        a, b = (np.asarray(y).astype(np.float64) for y in (a, b))
        assert np.linalg.norm(a - b) < 0.16 * np.linalg.norm(b)
