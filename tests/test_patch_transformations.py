"""What JAX's own products do, a patched one does too: types, errors, guards and derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, jet, roofline, sparse
from random_arrays import normal

import jax_tcgemm
import jax_tcgemm.blas
import jax_tcgemm.tensor
from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.problem.call_options import CallOptions

SCALARS = (((), ()), ((), ()))


def patched(f, implementation="host"):
    return jax_tcgemm.patch(implementation=implementation)(f)


def both_ways(f, *args):
    """What a function gives with our products, and with JAX's."""
    return patched(f)(*args), f(*args)


# --- scalars and weak types ---------------------------------------------------------------------

SQUARES = {
    "dot": lambda x: jnp.dot(x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 0),
    "einsum": lambda x: jnp.einsum(",->", x, x),
    "vdot": lambda x: jnp.vdot(x, x),
    "dot_general": lambda x: jax_tcgemm.dot_general(x, x, SCALARS, implementation="host"),
}


@pytest.mark.parametrize("scalar", [1.5, np.float32(1.5), jnp.float32(1.5)], ids=type)
@pytest.mark.parametrize("name", SQUARES)
def test_derivatives_of_scalars(name, scalar):
    f = patched(SQUARES[name])
    assert jax.grad(f)(scalar) == 3.0
    assert jax.hessian(f)(scalar) == 2.0
    assert jax.jvp(f, (scalar,), (scalar,)) == (2.25, 4.5)
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(jnp.arange(3.0)), [0, 2, 4])


WEAK = jnp.asarray(2.0)
FACTORS = {
    "weak and Python": (WEAK, 3.0),
    "weak and weak": (WEAK, WEAK),
    "weak and strong": (WEAK, jnp.float32(3)),
    "weak and narrower": (WEAK, jnp.float16(3)),
    "wider result": (jnp.float16(2), jnp.float16(3)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_results_and_gradients_are_as_weak_as_of_jax(name):
    def f(x, y):
        wide = lax.dot_general(x, y, SCALARS, preferred_element_type=jnp.float32)
        return jnp.dot(x, y) + jnp.sum(wide)

    ours, theirs = both_ways(jax.value_and_grad(f, (0, 1)), *FACTORS[name])
    assert ours == theirs
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)


def test_a_real_gradient_of_a_complex_product_does_not_warn(recwarn):
    def f(x, y):
        return jnp.real(lax.dot_general(x, y, (((1,), (0,)), ((), ())))).sum()

    x, y = normal(3, 4), normal(4, 2, seed=1) + 1j * normal(4, 2, seed=2)
    ours, theirs = both_ways(jax.grad(f), x, y)
    assert ours.dtype == jnp.float32
    # Sums of two terms of order 1.
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not [w for w in recwarn if "complex" in str(w.message).lower()]


# --- narrow types, errors and guards ------------------------------------------------------------


@pytest.mark.parametrize("preset", ["F16_F16_F16", "F32_F32_F32", "F64_F64_F64"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_presets_of_types_narrower_than_a_byte(dtype, preset, x64):
    x = jnp.asarray([[1, 0], [1, 0]], dtype)

    @jax.jit
    def f(x):
        return lax.dot_general(x, x, (((1,), (0,)), ((), ())), precision=preset)

    got = patched(f, None)(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), x.astype(jnp.float32))


def test_an_algorithm_reaches_xla(fake_cuda):
    algorithm = lax.DotAlgorithm(np.float32, np.float32, np.float32)

    def algorithms(f):
        lowered = jax.jit(f).trace(jnp.ones((3, 3))).lower(lowering_platforms=("cuda",))
        return re.findall("algorithm = <[^>]*>", lowered.as_text())

    def f(x):
        return lax.dot(x, x, precision=algorithm)

    assert algorithms(patched(f, None)) == algorithms(f) != []


SIZES = jnp.array([1, 3])
NUMBERS = (((1,), (0,)), ((), ()))
MISFITS = {
    "matmul": lambda: jnp.ones((2, 3)) @ jnp.ones((2, 3)),
    "sizes": lambda: lax.dot_general(jnp.ones((2, 3)), jnp.ones((2, 3)), NUMBERS),
    "dimensions": lambda: lax.dot_general(jnp.ones(3), jnp.ones(3), NUMBERS),
    "ragged": lambda: lax.ragged_dot(jnp.ones((4, 3)), jnp.ones((2, 2, 5)), SIZES),
    "groups": lambda: lax.ragged_dot(jnp.ones((4, 3)), jnp.ones((3, 3, 5)), SIZES),
}


@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit_are_errors_of_the_types_that_jax_raises(name):
    with pytest.raises(TypeError) as theirs:
        MISFITS[name]()
    with pytest.raises(type(theirs.value)) as ours:
        patched(MISFITS[name])()
    assert isinstance(ours.value, ValueError)
    assert "got" in str(ours.value)


def test_shapes_that_do_not_fit_are_both_errors_of_matmul():
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="matmul: the last dimension of a must equal"):
            jax_tcgemm.matmul(jnp.ones((2, 3)), jnp.ones((2, 3)))


def test_eager_products_transfer_nothing():
    x, w, sizes = normal(4, 3), normal(2, 3, 5, seed=1), SIZES

    def f():
        return x.T @ x, lax.ragged_dot(x, w, sizes)

    with jax.transfer_guard("disallow"):
        ours = patched(f)()
    for got, expected in zip(ours, f(), strict=True):
        # Sums of at most four terms of order 1.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


STRICT = {
    "products": lambda x, w: lax.ragged_dot(x @ x.T @ x, w, SIZES),
    "grouped": lambda x, w: jax_tcgemm.ragged_dot(x, w, SIZES, implementation="xla"),
    "grouped and fused": lambda x, w: jax_tcgemm.ragged_dot(
        x, w, SIZES, activation="silu", implementation="xla"
    ),
    "fused": lambda x, w: jax_tcgemm.linear(
        x, w[0], bias=w[1, 0], activation="gelu_tanh", implementation="xla"
    ),
    "combined": lambda x, w: jax_tcgemm.combine_rows(x, jnp.array([[0, 2], [1, 3]])) * w[0, 0, 0],
}


@pytest.mark.parametrize("name", STRICT)
def test_what_a_caller_must_not_promote_is_no_matter_of_ours(name):
    x, w = normal(4, 3), normal(2, 3, 5, seed=1)
    f = patched(jax.value_and_grad(lambda *args: jnp.sum(STRICT[name](*args)), (0, 1)), None)
    expected = f(x, w)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.tree.map(np.testing.assert_array_equal, f(x, w), expected)


# --- sparse arrays ------------------------------------------------------------------------------

DENSE = normal(4, 6) * (normal(4, 6, seed=1) > 0)
BCOO, BCSR = sparse.BCOO.fromdense(DENSE), sparse.BCSR.fromdense(DENSE)
X = normal(6, 5, seed=2)


def sparsified(f, use_tracer):
    return sparse.sparsify(f, use_tracer=use_tracer)


SPARSE = {
    "bcoo": lambda: BCOO @ X,
    "bcsr": lambda: BCSR @ X,
    "from the right": lambda: X.T @ BCOO.T,
    "both": lambda: (BCOO.T @ BCOO).todense(),
    "interpreter": lambda: sparsified(lambda m, x: jnp.einsum("ij,jk->ki", m, x), False)(BCOO, X),
    "tracer": lambda: sparsified(lambda m, x: jnp.einsum("ij,jk->ki", m, x), True)(BCOO, X),
    "jit": lambda: sparsified(jax.jit(lambda m, x: jnp.tanh(m @ x)), False)(BCOO, X),
    "vmap of a dense one": lambda: sparsified(jax.vmap(jnp.dot, (None, 1), 0), False)(BCOO, X),
    "gradient": lambda: sparse.grad(lambda m, x: jnp.sum(jnp.sin(m @ x)), 1)(BCOO, X),
    "sparse gradient": lambda: sparse.grad(lambda m, x: jnp.sum(jnp.sin(m @ x)))(BCOO, X).data,
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_arrays_go_to_jax(name):
    ours, theirs = both_ways(SPARSE[name])
    # Sums of at most six terms of order 1.
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_transposed_product_of_two_sparse_arrays():
    def f(x, y):
        return primitive.dot_general(
            *(x, y),
            options=CallOptions("dot_general"),
            dimension_numbers=(((1,), (0,)), ((), ())),
            permutation=(1, 0),
        )

    got = sparse.sparsify(f)(BCOO.T, BCOO)
    assert isinstance(got, sparse.BCOO)
    np.testing.assert_allclose(got.todense(), (DENSE.T @ DENSE).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sparse.sparsify(f)(BCOO, X), (DENSE @ X).T, rtol=1e-5, atol=1e-5)


# --- Taylor series ------------------------------------------------------------------------------

A, B = normal(4, 6), normal(6, 5, seed=1)
W = normal(2, 6, 5, seed=2)
GATED = normal(6, 2, 5, seed=3)


def along_a_curve(f, x):
    """The terms of f(x + t + t**2 / 2), t times one, by jet and by repeated derivatives."""
    ones = jnp.ones_like(x)
    got = jet.jet(f, (x,), ((ones, ones, jnp.zeros_like(x)),))

    def derivative(g):
        return lambda t: jax.jvp(g, (t,), (1.0,))[1]

    terms = [lambda t: f(x + t * ones + t**2 / 2 * ones)]
    for _ in range(3):
        terms.append(derivative(terms[-1]))
    value, *others = [g(0.0) for g in terms]
    return got, (value, others)


CURVES = {
    "matmul": lambda x: jax_tcgemm.matmul(x, x.T, implementation="host"),
    "patched einsum": patched(lambda x: jnp.einsum("ij,kj->ki", x, x) @ (x**2)),
    "jit": jax.jit(patched(lambda x: x @ B)),
    "gradient": patched(jax.grad(lambda x: jnp.sum((x @ B) ** 3))),
    "ragged": patched(lambda x: lax.ragged_dot(x, W * x[0, 0], SIZES)),
    "fused": lambda x: jax_tcgemm.linear(x, B * x[0, 0], bias=x[0, :5], activation="tanh"),
    "gated": lambda x: jax_tcgemm.gated_linear(x, GATED, activation="sigmoid"),
    "gradient of fused": jax.grad(
        lambda x: jnp.sum(jax_tcgemm.linear(x, B, activation="tanh") ** 2)
    ),
    "contract": lambda x: jax_tcgemm.tensor.contract("ij,jk->ki", x, B, c=(x @ B).T, beta=0.5),
    "grouped and fused": lambda x: jax_tcgemm.ragged_dot(x, W, SIZES, activation="tanh"),
}


@pytest.mark.parametrize("name", CURVES)
def test_taylor_series(name):
    got, expected = along_a_curve(CURVES[name], A)
    # Third derivatives of sums of tens of terms, which reach a thousand.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-2), got, expected)


# --- checks for NaN -----------------------------------------------------------------------------

INFINITE = jnp.array([[jnp.inf, -jnp.inf], [1.0, 1.0]])
CHECKED = {
    "dot_general": patched(lambda x: x @ jnp.ones((2, 2))),
    "ragged_dot": patched(lambda x: lax.ragged_dot(x, jnp.ones((2, 2, 2)), jnp.array([1, 1]))),
    "epilogue_product": lambda x: jax_tcgemm.linear(x, jnp.ones((2, 2)), activation="relu"),
    "contract": lambda x: jax_tcgemm.tensor.contract("ij,jk->ik", x, jnp.ones((2, 2))),
    "blas": lambda x: jax_tcgemm.blas.gemm(x, jnp.ones((2, 2))),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_finds_a_nan(name):
    def f(x):
        return jnp.max(jnp.nan_to_num(CHECKED[name](x)))

    checked = checkify.checkify(f, errors=checkify.float_checks)
    assert f"nan generated by primitive: tcgemm_{name}" in checked(INFINITE)[0].get()
    assert f"tcgemm_{name}" in jax.jit(checked)(INFINITE)[0].get()
    assert checked(jnp.ones((2, 2)))[0].get() is None


# --- operations ---------------------------------------------------------------------------------

COUNTED = {
    "matmul": (lambda: A @ B, 2 * 4 * 6 * 5),
    "batched": (lambda: jnp.einsum("bij,bjk->bik", W, W.mT), 2 * 2 * 6 * 5 * 6),
    "scan": (lambda: lax.scan(lambda x, _: (A.T @ (A @ x), None), B, length=3)[0], None),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_roofline_counts_what_it_counts_of_jax(name):
    f, flops = COUNTED[name]
    ours, theirs = (roofline.roofline(g)()[1] for g in (patched(f), f))
    assert ours == theirs
    assert flops is None or ours.flops == flops


@pytest.mark.parametrize(
    ("f", "flops"),
    [
        (lambda: jax_tcgemm.linear(A, B, activation="relu"), 2 * 4 * 6 * 5),
        (lambda: jax_tcgemm.gated_linear(A, GATED), 2 * 4 * 6 * 10),
        (lambda: lax.ragged_dot(A, W, SIZES), 2 * 4 * 6 * 5),
    ],
    ids=["linear", "gated", "ragged"],
)
def test_the_roofline_counts_products(f, flops):
    assert roofline.roofline(patched(f))()[1].flops == flops
