"""`syrk` and `syr2k`: values against float64, derivatives, what runs, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg.blas
from blas_cases import ALL, COMPLEX, HALF, epsilon, wide

import jax_tcgemm
from jax_tcgemm import blas
from jax_tcgemm.products import gram

pytestmark = pytest.mark.usefixtures("x64")

ROUTINES = ("syrk", "syr2k")


def draw(*shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if dtype in COMPLEX:
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def draw_symmetric(*shape, dtype="float32", seed=9):
    c = draw(*shape, dtype=dtype, seed=seed)
    return c + jnp.swapaxes(c, -1, -2)


def transposed(x):
    return np.swapaxes(x, -1, -2)


def factors_of(routine, *shape, dtype="float32"):
    return [draw(*shape, dtype=dtype, seed=seed) for seed in range(1 if routine == "syrk" else 2)]


def reference(factors, c=None, alpha=1.0, beta=1.0, trans="N"):
    """The result in float64, and what each element's rounding errors are measured by."""
    factors = [wide(x) if trans == "N" else transposed(wide(x)) for x in factors]
    found = scale = 0
    # x by x, or x by y and y by x.
    for x, y in zip(factors, factors[::-1], strict=True):
        found = found + alpha * (x @ transposed(y))
        scale = scale + abs(alpha) * (np.abs(x) @ transposed(np.abs(y)))
    if c is not None:
        found, scale = found + beta * wide(c), scale + abs(beta) * np.abs(wide(c))
    return found, scale


def check(got, expected, length):
    """The tolerance of blas_cases.check: the roundings of `length` sums, and of the result."""
    value, scale = expected
    dtype = got.dtype.name
    assert got.shape == value.shape
    summed = epsilon("float32" if dtype in HALF else dtype)
    allowed = 8 * (length + 4) * summed * scale + 2 * epsilon(dtype) * np.abs(value)
    assert np.all(np.abs(wide(got) - value) <= allowed)
    # Symmetric, too.
    np.testing.assert_array_less(np.abs(wide(got) - transposed(wide(got))), 2 * allowed + 1e-300)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("routine", ROUTINES)
def test_against_float64(routine, dtype, jitted):
    call = functools.partial(getattr(blas, routine), alpha=0.75, beta=-2)
    for n, k in ((1, 1), (5, 9), (33, 17), (70, 8), (4, 0), (0, 3)):
        for trans in "NT":
            f = functools.partial(call, trans=trans)
            f = jax.jit(f) if jitted else f
            factors = factors_of(routine, *((n, k) if trans == "N" else (k, n)), dtype=dtype)
            c = draw_symmetric(n, n, dtype=dtype)
            got = f(*factors, c)
            assert got.dtype == dtype
            check(got, reference(factors, c, 0.75, -2, trans), 2 * k)
            check(f(*factors), reference(factors, None, 0.75, 0, trans), 2 * k)


@pytest.mark.parametrize("routine", ROUTINES)
def test_batches(routine):
    f = getattr(blas, routine)
    factors, c = factors_of(routine, 3, 20, 7), draw_symmetric(20, 20)
    expected = reference(factors, c)
    check(f(*factors, c), expected, 14)
    check(jax.vmap(f, in_axes=(*[0] * len(factors), None))(*factors, c), expected, 14)
    # c has more dimensions.
    c = draw_symmetric(2, 3, 20, 20)
    check(jax.jit(f)(*factors, c), reference(factors, c), 14)
    one = [x[0] for x in factors]
    check(jax.vmap(jax.vmap(lambda c: f(*one, c)))(c), reference(one, c), 14)
    # An array without a batch beside another with one.
    if routine == "syr2k":
        a, b = factors
        check(f(a[0], b), reference([a[:1], b]), 14)


@pytest.mark.parametrize("alpha", [1.5, np.float32(1.5), jnp.float32(1.5)])
@pytest.mark.parametrize("beta", [-2, jnp.float32(-2)])
@pytest.mark.parametrize("routine", ROUTINES)
def test_scalars(routine, alpha, beta):
    factors, c = factors_of(routine, 12, 9), draw_symmetric(12, 12)
    got = getattr(blas, routine)(*factors, c, alpha=alpha, beta=beta)
    check(got, reference(factors, c, 1.5, -2), 18)


@pytest.mark.parametrize("routine", ROUTINES)
def test_complex_scalars_and_no_conjugation(routine):
    factors = factors_of(routine, 12, 9, dtype="complex128")
    c = draw_symmetric(12, 12, dtype="complex128")
    f = functools.partial(getattr(blas, routine), alpha=1 + 2j, beta=0.5j)
    check(f(*factors, c), reference(factors, c, 1 + 2j, 0.5j), 18)


@pytest.mark.parametrize("trans", [0, 1])
def test_against_scipys_blas(trans):
    a, b, c = (np.asarray(x) for x in (*factors_of("syr2k", 6, 6, dtype="float64"), draw(6, 6)))
    c = c.astype(np.float64)
    how = {"trans": "NT"[trans], "alpha": 1.5, "beta": -1.0}
    for lower in (False, True):
        triangle = np.tril if lower else np.triu
        options = {"trans": trans, "lower": lower, "beta": -1.0, "c": c}
        expected = scipy.linalg.blas.dsyrk(1.5, a, **options)
        got = blas.syrk(a, c, lower=lower, **how)
        np.testing.assert_allclose(triangle(got), triangle(expected), rtol=1e-13, atol=1e-13)
        expected = scipy.linalg.blas.dsyr2k(1.5, a, b, **options)
        got = blas.syr2k(a, b, c, lower=lower, **how)
        np.testing.assert_allclose(triangle(got), triangle(expected), rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(got, got.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("routine", ROUTINES)
def test_the_other_triangle_is_not_read(routine, lower):
    factors, c = factors_of(routine, 3, 20, 7), draw_symmetric(3, 20, 20)
    kept = np.tril(np.ones((20, 20), bool)) if lower else np.triu(np.ones((20, 20), bool))
    given = jnp.where(kept, c, jnp.nan)
    f = functools.partial(getattr(blas, routine), lower=lower, beta=0.5)
    check(jax.jit(f)(*factors, given), reference(factors, c, 1, 0.5), 14)
    gradient = jax.grad(lambda c: jnp.sum(f(*factors, c)))(given)
    np.testing.assert_allclose(gradient, kept * (1 - 0.5 * np.eye(20)) * np.ones((3, 1, 1)))


@pytest.mark.parametrize("alpha", [1, jnp.ones(())], ids=["number", "array"])
@pytest.mark.parametrize("beta", [0, np.float32(0)])
@pytest.mark.parametrize("routine", ROUTINES)
def test_c_is_not_read_beside_a_beta_of_0(routine, alpha, beta):
    factors = factors_of(routine, 5, 4)
    got = getattr(blas, routine)(*factors, jnp.full((5, 5), jnp.nan), alpha=alpha, beta=beta)
    check(got, reference(factors), 8)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_gradients(routine, dtype, shape):
    """Also of the form for long k, and of the form that float32 has with TF32."""
    n = shape[0]
    factors, c = factors_of(routine, *shape, dtype=dtype), draw_symmetric(n, n, dtype=dtype)
    alpha, beta = jnp.asarray(0.5, dtype), jnp.asarray(2, dtype)

    def ours(factors, c, alpha, beta):
        return getattr(blas, routine)(*factors, c, alpha=alpha, beta=beta)

    def theirs(factors, c, alpha, beta):
        pairs = zip(factors, factors[::-1], strict=True)
        return alpha * sum(x @ y.T for x, y in pairs) + beta * c

    def loss(f, *args):
        return jnp.sum(jnp.abs(jnp.sin(0.1 * f(*args))) ** 2)

    args = factors, c, alpha, beta
    for transformed in (jax.grad, jax.jacfwd) if dtype == "float64" else (jax.grad,):
        got, expected = (
            transformed(functools.partial(loss, f), (0, 1, 2, 3))(*args) for f in (ours, theirs)
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, expected
        )
    if dtype == "float64":
        got, expected = (
            jax.hessian(functools.partial(loss, f))(factors, c, alpha, beta) for f in (ours, theirs)
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8), got, expected
        )


def test_gradients_of_the_concatenated_product(monkeypatch):
    """Values too; on a CPU the product is concatenated in this test alone."""
    monkeypatch.setattr(gram, "_product_and_transpose", gram._concatenated)
    a, b, c = *factors_of("syr2k", 20, 12), draw_symmetric(20, 20)
    (call,) = jax_tcgemm.explain(functools.partial(blas.syr2k, precision=None), a, b, c)
    assert call.problem.k == 24

    def ours(a, b, c, alpha):
        return jnp.sum(jnp.sin(blas.syr2k(a, b, c, alpha=alpha, precision=None)))

    def theirs(a, b, c, alpha):
        return jnp.sum(jnp.sin(alpha * (a @ b.T + b @ a.T) + c))

    args = a, b, c, jnp.float32(0.25)
    with jax.default_matmul_precision("highest"):
        expected = jax.grad(theirs, (0, 1, 2, 3))(*args)
        np.testing.assert_allclose(ours(*args), theirs(*args), rtol=1e-3)
    for got, value in zip(jax.grad(ours, (0, 1, 2, 3))(*args), expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-3, atol=1e-3)
    (got,) = jax.jacrev(lambda b: ours(a, b, c, 0.25), (0,))(b)
    np.testing.assert_allclose(got, expected[1], rtol=1e-3, atol=1e-3)


# --- what runs ----------------------------------------------------------------------------------


def explained(f, *args):
    return jax_tcgemm.explain(f, *args, platform="cuda")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("bfloat16", "highest"),
        ("float16", None),
        ("float32", None),
        ("float32", "BF16_BF16_F32_X3"),
        ("float32", "BF16_BF16_F32_X9"),
    ],
)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("trans", ["N", "T"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_half_is_computed(routine, trans, batch, dtype, precision):
    n, k = 2048, 512
    a = jax.ShapeDtypeStruct((*batch, *((n, k) if trans == "N" else (k, n))), dtype)
    c = jax.ShapeDtypeStruct((n, n), dtype)
    f = functools.partial(getattr(blas, routine), trans=trans, precision=precision)
    factors = [a] * (1 if routine == "syrk" else 2)
    for call in (*explained(f, *factors), *explained(f, *factors, c)):
        assert call.problem.symmetric
        assert call.implementation == "wgmma"
        terms = {"BF16_BF16_F32_X3": 3, "BF16_BF16_F32_X9": 9}.get(precision, 1)
        assert call.problem.k == len(factors) * terms * k
        assert call.flops == call.problem.batch * n * (n + 1) * call.problem.k


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((512, 1024), "bfloat16"), ((512, 256), "float32"), ((512, 256), "complex64")],
)
def test_a_product_and_its_transpose(shape, dtype):
    """Of long sums, and of dtypes of which kernels compute no half: n x n x k, not 2 k."""
    a = jax.ShapeDtypeStruct(shape, dtype)
    (call,) = explained(blas.syr2k, a, a)
    assert call.problem.k == shape[1]
    assert not call.problem.symmetric or dtype == "complex64"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cpu_computes_a_product_and_its_transpose(dtype):
    a = jax.ShapeDtypeStruct((512, 256), dtype)
    (call,) = jax_tcgemm.explain(functools.partial(blas.syr2k, precision=None), a, a)
    assert call.problem.k == 256


def test_derivatives_are_one_product_for_each_matrix():
    a = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)

    def loss(*factors):
        f = blas.syrk if len(factors) == 1 else blas.syr2k
        return jnp.sum(jnp.sin(f(*factors).astype(jnp.float32)))

    for factors in ([a], [a, a]):
        first, *others = explained(jax.grad(loss, tuple(range(len(factors)))), *factors)
        assert first.problem.symmetric
        assert [call.flops for call in others] == [2 * 1024 * 1024 * 512] * len(factors)


def test_highest_multiplies_float32_in_float32():
    a = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    for f, arguments in ((blas.syrk, [a]), (blas.syr2k, [a, a])):
        (call,) = explained(f, *arguments)
        assert call.problem.compute == "f32"
        (call,) = explained(functools.partial(f, precision=None), *arguments)
        assert call.problem.compute == "tf32"


# --- errors -------------------------------------------------------------------------------------

A, SQUARE = jnp.ones((3, 4)), jnp.ones((3, 3))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": jnp.ones(3)}, "a must have at least 2 dimensions"),
        ({"a": "a"}, "a must be"),
        ({"a": jnp.ones((3, 4), jnp.int32)}, "a must have one of the dtypes"),
        ({"c": jnp.ones((4, 4))}, "c must be a matrix of 3 x 3, got c.shape="),
        ({"c": jnp.ones((1, 3))}, "c must be a matrix of 3 x 3, got c.shape="),
        ({"a": jnp.ones((2, 3, 4)), "c": jnp.ones((5, 3, 3))}, "batch dimensions must broadcast"),
        ({"c": SQUARE, "trans": "T"}, "c must be a matrix of 4 x 4"),
        ({"alpha": jnp.ones(2)}, "alpha must be a scalar"),
        ({"beta": "2", "c": SQUARE}, "beta must be a scalar"),
        ({"alpha": 1j}, "alpha must be real"),
        ({"trans": "C", "a": jnp.ones((3, 4), jnp.complex64)}, "trans must be one of N, T, got"),
        ({"trans": "n"}, "trans must be one of N, T, C"),
        ({"lower": "L", "c": SQUARE}, "lower must be True or False"),
        ({"precision": "best"}, "precision must be"),
        ({"implementation": "magic"}, "implementation must be"),
    ],
)
def test_errors(given, says):
    given = {"a": A} | given
    with pytest.raises((TypeError, ValueError), match=f"^blas.syrk: {says}"):
        blas.syrk(**given)
    both = {"b": given["a"]} if given["a"] is not A else {"b": A}
    if not says.startswith("a must have one of"):
        with pytest.raises((TypeError, ValueError), match=f"^blas.syr2k: {says}"):
            blas.syr2k(**given, **both)


def test_matrices_of_unlike_shapes():
    with pytest.raises(ValueError, match=r"^blas.syr2k: a and b must be matrices of one shape"):
        blas.syr2k(A, A.T)
