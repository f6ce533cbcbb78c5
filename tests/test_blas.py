"""BLAS calls on the host and in XLA against float64, and at the edges of what BLAS defines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg.blas
from blas_cases import ALL, CASES, FULL, ROUTINES, epsilon, run_all

from jax_tcgemm import blas

pytestmark = pytest.mark.usefixtures("x64")


def dtypes_of(routine):
    return next(case.dtypes for case in CASES if case.routine == routine)


PAIRS = [(routine, dtype) for routine in ROUTINES for dtype in dtypes_of(routine)]


@pytest.mark.parametrize(("routine", "dtype"), PAIRS, ids=lambda value: value)
def test_host_against_float64(routine, dtype):
    """Matrices: every case in single precision; the other dtypes run the same code, in turns."""
    has_matrix = routine in ("gemv", "gbmv", "trsv", "trsm", "gemm")
    step = 5 if has_matrix and dtype not in ("float32", "complex64") else 1
    run_all(routine, dtype, ALL.index(dtype) % step, step, implementation="host")


@pytest.mark.parametrize("routine", ROUTINES)
def test_xla_against_float64(routine):
    dtypes = dtypes_of(routine)
    run_all(routine, dtypes[ROUTINES.index(routine) % len(dtypes)], implementation="xla")


def test_every_routine_has_cases():
    ours = {name for name in blas.__all__ if name.islower()}
    helpers = {"amax", "amin", "to_band", "from_band", "set_logging", "gemm_batched"}
    products = {"syrk", "syr2k"}  # Of this library's GEMMs; tests/test_blas_symmetric.py has cases.
    routines = {"dot" if name in ("dotu", "dotc") else name for name in ROUTINES}
    assert routines == ours - helpers - products


# --- worked examples ----------------------------------------------------------------------------

BAND = jnp.array([[1.0, 3, 0, 0], [2, 1, 3, 0], [0, 2, 1, 3], [0, 0, 2, 1]])


def test_iamax_with_increment_picks_the_first():
    """Of (2, 1, 1): index 1 as BLAS counts, 0 here."""
    x = jnp.array([2.0, 4, 5, 1, 2, 4, 1, 5])
    assert blas.iamax(x, increment=3) == 0
    assert blas.amax(x, increment=3) == 2


def test_dot_of_every_second_with_every_fourth():
    x, y = jnp.arange(1.0, 9), jnp.arange(9.0, 17)
    assert blas.dot(x, y, n=2, increment_x=2, increment_y=4) == 48


def test_gemv_and_gbmv_of_a_band():
    x, y = jnp.arange(1.0, 5), jnp.arange(5.0, 9)
    np.testing.assert_array_equal(blas.gemv(BAND, x, y), [12, 19, 26, 18])
    np.testing.assert_array_equal(
        blas.gbmv(blas.to_band(BAND, 1, 1), x, y, kl=1, ku=1, beta=0), [7, 13, 19, 10]
    )
    np.testing.assert_array_equal(blas.from_band(blas.to_band(BAND, 1, 1), 4, 1, 1), BAND)


@pytest.mark.parametrize("implementation", ["host", "xla"])
def test_gemm_in_rows(implementation):
    a = jnp.array([[7.0, 1, 2], [4, 3, -2], [2, 3, -5], [8, 6, 3], [2, -4, 1]])
    b = jnp.array([[2.0, 5, -3, 1], [0, 1, -2, 2], [1, 0, 2, -1]])
    c = jnp.array([[2.0, 5, -3, 1], [0, 1, -2, 2], [4, 0, 2, -1], [2, 0, 0, 2], [1, -2, 5, -7]])
    out = blas.gemm(a, b, c, alpha=1, beta=1, implementation=implementation)
    np.testing.assert_array_equal(
        out,
        [
            [18, 41, -22, 8],
            [6, 24, -24, 14],
            [3, 13, -20, 12],
            [21, 46, -30, 19],
            [6, 4, 9, -14],
        ],
    )


# --- against SciPy's BLAS -----------------------------------------------------------------------


def test_a_band_in_scipys_order():
    """SciPy stores a band by columns; ours lies by rows. The same product comes out of both."""
    rng = np.random.default_rng(0)
    kl, ku, m, n = 2, 1, 6, 5
    full = np.triu(np.tril(rng.standard_normal((m, n)), ku), -kl)
    x, y = rng.standard_normal(n), rng.standard_normal(m)
    columns = np.zeros((kl + ku + 1, n))
    for i in range(m):
        for j in range(max(0, i - kl), min(n, i + ku + 1)):
            columns[ku + i - j, j] = full[i, j]
    expected = scipy.linalg.blas.dgbmv(m, n, kl, ku, 1.5, columns, x, beta=-1, y=y)
    ours = blas.gbmv(blas.to_band(full, kl, ku), x, y, kl=kl, ku=ku, columns=n, alpha=1.5, beta=-1)
    np.testing.assert_allclose(ours, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize("solve", ["trsv", "trsm_left", "trsm_right"])
def test_a_singular_triangle_gives_infinities_and_nans(solve, implementation):
    a = np.tril(np.arange(1.0, 10).reshape(3, 3))
    a[1, 1] = 0
    b = np.ones((3, 3)) if "trsm" in solve else np.ones(3)
    with np.errstate(all="ignore"):
        if solve == "trsv":
            expected = scipy.linalg.blas.dtrsv(a, b, lower=1)
            out = blas.trsv(a, b, implementation=implementation)
        else:
            side = solve.removeprefix("trsm_")
            expected = scipy.linalg.blas.dtrsm(1.0, a, b, side=side == "right", lower=1)
            out = blas.trsm(a, b, side=side, implementation=implementation)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))
    assert not np.all(np.isfinite(out))


# --- numerics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("power", [-1, 1])
def test_nrm2_neither_overflows_nor_underflows(power, dtype, implementation):
    largest = float(jnp.finfo(dtype).max)
    scale = largest ** (0.9 * power)
    x = jnp.asarray(np.array([3.0, -4.0]) * scale, dtype)
    out = float(blas.nrm2(x, implementation=implementation))
    assert out == pytest.approx(5 * scale, rel=4 * epsilon(dtype))


@pytest.mark.parametrize("implementation", ["host", "xla"])
def test_half_types_are_summed_in_float32(implementation):
    x = jnp.ones(5000, jnp.bfloat16)  # In bfloat16 the sum would stop at 256.
    assert blas.dot(x, x, implementation=implementation) == jnp.bfloat16(5000)
    assert blas.asum(x, implementation=implementation) == jnp.bfloat16(5000)


@pytest.mark.parametrize("implementation", ["host", "xla"])
@pytest.mark.parametrize("alpha", [1, jnp.ones(())], ids=["number", "array"])
def test_what_beta_zero_leaves_out_is_not_read(alpha, implementation):
    a, nan = jnp.eye(3), jnp.full((3, 3), jnp.nan)
    out = blas.gemm(a, a, nan, alpha=alpha, beta=0, implementation=implementation)
    np.testing.assert_array_equal(out, a)
    out = blas.gemv(a, jnp.ones(3), nan[0], alpha=alpha, beta=0.0, implementation=implementation)
    np.testing.assert_array_equal(out, np.ones(3))


@pytest.mark.parametrize("implementation", ["host", "xla"])
def test_what_a_band_or_a_triangle_leaves_out_is_not_read(implementation):
    band = blas.to_band(BAND, 1, 1).at[0, 0].set(jnp.nan).at[3, 2].set(jnp.nan)
    widths = {"kl": np.int32(1), "ku": np.int64(1)}
    out = blas.gbmv(band, jnp.arange(1.0, 5), **widths, implementation=implementation)
    np.testing.assert_array_equal(out, [7, 13, 19, 10])
    a = jnp.array([[jnp.nan, jnp.nan], [3.0, jnp.nan]])
    out = blas.trsv(a, jnp.array([1.0, 5]), unit_diagonal=True, implementation="host")
    np.testing.assert_array_equal(out, [1, 2])


def test_empty_arrays():
    empty = jnp.zeros((0, 3))
    assert blas.asum(jnp.zeros(0)) == 0
    assert blas.dot(jnp.zeros(0), jnp.zeros(0)) == 0
    np.testing.assert_array_equal(blas.gemv(empty, jnp.ones(3)), [])
    np.testing.assert_array_equal(blas.gemv(empty.T, jnp.ones(0), jnp.ones(3), beta=2), [2, 2, 2])
    np.testing.assert_array_equal(blas.gemm(empty.T, empty, jnp.ones((3, 3))), np.ones((3, 3)))
    assert blas.trsm(jnp.eye(2), jnp.zeros((2, 0))).shape == (2, 0)
    for shape in ((0, 3), (3, 0)):
        gradient = jax.grad(lambda a: blas.gemv(a, jnp.ones(a.shape[1])).sum())(jnp.ones(shape))
        assert gradient.shape == shape
    band = {"kl": 1, "ku": 1, "columns": 0, "beta": 2}
    f = lambda a, x, y: blas.gbmv(a, x, y, **band)  # noqa: E731
    args = jnp.ones((2, 3)), jnp.zeros(0), jnp.ones(2)
    np.testing.assert_array_equal(f(*args), [2, 2])
    found = jax.grad(lambda *args: f(*args).sum(), (0, 1, 2))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, (jnp.zeros((2, 3)), [], [2, 2]))
    assert blas.gemm_batched([], []) == []


def test_dtypes_promote():
    assert blas.dot(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)).dtype == jnp.float32
    assert blas.gemv(jnp.eye(2, dtype=jnp.complex64), jnp.ones(2, jnp.float32)).dtype == "complex64"
