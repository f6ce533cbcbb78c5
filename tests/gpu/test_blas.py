"""BLAS calls on cuBLAS: every case that the host passes, and what only a GPU has."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blas_cases import CASES, HALF, ROUTINES, run_all

import jax_tcgemm
from jax_tcgemm import blas

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

NOT_IN_HALF = ("asum", "gbmv", "trsv", "trsm")


def pairs():
    for routine in ROUTINES:
        for dtype in next(case.dtypes for case in CASES if case.routine == routine):
            if not (dtype in HALF and routine in NOT_IN_HALF):
                yield routine, dtype


@pytest.mark.parametrize(("routine", "dtype"), list(pairs()), ids=lambda value: value)
def test_cublas_against_float64(routine, dtype):
    run_all(routine, dtype, implementation="cublas")


@pytest.mark.parametrize("routine", ROUTINES)
def test_default_against_float64(routine):
    run_all(routine, "complex64")


@pytest.mark.parametrize("math", ["tf32", "pedantic", "no_reduced_precision"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "float64"])
@pytest.mark.parametrize("routine", ["gemm", "gemv"])
def test_math_modes(routine, dtype, math):
    options = blas.Options(math=math, workspace_bytes=1 << 22)
    run_all(routine, dtype, implementation="cublas", options=options)


def test_tf32_rounds_and_the_default_does_not():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((512, 512)), jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64)

    def error(math):
        out = blas.gemm(x, x, implementation="cublas", options=blas.Options(math=math))
        return np.max(np.abs(np.asarray(out, np.float64) - exact))

    assert error("default") < 1e-3 < error("tf32") < 1


@pytest.mark.parametrize("routine", ["trsm", "gemm", "gemv", "dotu", "nrm2"])
def test_atomics_and_the_smallest_workspace(routine):
    options = blas.Options(atomics=True, workspace_bytes=256)
    run_all(routine, "float32", implementation="cublas", options=options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex128"])
def test_gemm_over_arrays_of_pointers(dtype):
    """More arrays than one launch takes addresses of."""
    count, rng = 150, np.random.default_rng(0)
    a, b, c = (
        [jnp.asarray(rng.integers(-3, 4, shape), dtype) for _ in range(count)]
        for shape in ((5, 3), (4, 3), (5, 4))
    )
    call = functools.partial(blas.gemm_batched, trans_b="T", beta=2, implementation="cublas")
    for x, y, z, out in zip(a, b, c, jax.jit(call)(a, b, c), strict=True):
        expected = np.asarray(x, complex) @ np.asarray(y, complex).T + 2 * np.asarray(z, complex)
        np.testing.assert_array_equal(np.asarray(out, complex), expected)
    batched = jax.vmap(call, (0, None, None))([jnp.stack([x, -x]) for x in a], b, c)
    for x, y, z, out in zip(a, b, c, batched, strict=True):
        product = np.asarray(x, complex) @ np.asarray(y, complex).T
        for sign, item in ((1, out[0]), (-1, out[1])):
            expected = sign * product + 2 * np.asarray(z, complex)
            np.testing.assert_array_equal(np.asarray(item, complex), expected)


def test_a_batch_over_the_limit_of_a_grid():
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.integers(-3, 4, (70_000, 2, 3)), jnp.float32)
    x = jnp.asarray(rng.integers(-3, 4, (70_000, 3)), jnp.float32)
    out = blas.gemv(a, x, implementation="cublas")
    np.testing.assert_array_equal(out, np.einsum("bij,bj->bi", a, x))
    out = blas.gemm(a, jnp.swapaxes(a, 1, 2), implementation="cublas")
    np.testing.assert_array_equal(out, np.einsum("bij,bkj->bik", a, a))
    lower = jnp.tile(jnp.array([[1.0, 0], [2, 4]], jnp.float32), (70_000, 1, 1))
    out = blas.trsv(lower, 4 * x[:, :2], implementation="cublas")
    x = 4 * np.asarray(x)
    np.testing.assert_array_equal(out, np.stack([x[:, 0], (x[:, 1] - 2 * x[:, 0]) / 4], 1))


@pytest.mark.parametrize("solve", ["trsv", "trsm"])
def test_a_singular_triangle_ends(solve):
    a = jnp.tril(jnp.arange(1.0, 10).reshape(3, 3)).at[1, 1].set(0)
    b = jnp.ones(3) if solve == "trsv" else jnp.ones((3, 3))
    out = getattr(blas, solve)(a, b, implementation="cublas")
    assert not np.all(np.isfinite(out))


def test_derivatives_are_those_of_the_host():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((6, 6)) / 6 + 2 * np.eye(6)
    x = rng.standard_normal((3, 6))

    def loss(implementation, a, x, alpha):
        run = functools.partial
        y = run(blas.gemv, implementation=implementation)(a, x, x, alpha=alpha)
        y = run(blas.trsv, implementation=implementation)(a, y)
        z = run(blas.gemm, implementation=implementation)(y, a, trans_b="T")
        z = run(blas.trsm, implementation=implementation)(a, z, side="right", alpha=alpha)
        return run(blas.nrm2, implementation=implementation)(z.reshape(-1))

    grads = []
    for implementation, platform in (("cublas", "cuda"), ("host", "cpu")):
        arrays = jax.device_put((a, x, np.float64(1.5)), jax.devices(platform)[0])
        f = jax.jit(jax.grad(functools.partial(loss, implementation), (0, 1, 2)))
        grads.append(jax.tree.map(np.asarray, f(*arrays)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), *grads)


def test_calls_in_a_command_buffer_follow_their_inputs():
    """Eight calls, which XLA captures into a graph; each step has other buffers."""

    @jax.jit
    def step(a, x, alpha):
        for _ in range(3):
            x = blas.gemv(a, x, x, alpha=alpha, beta=0.5, implementation="cublas")
            x = blas.trsv(a, x, implementation="cublas")
        y = blas.trsm(a, jnp.stack([x, -x], 1), implementation="cublas")
        (product,) = blas.gemm_batched([a], [y], implementation="cublas")
        index = blas.iamax(x, implementation="cublas")
        return product, blas.dot(x, x, implementation="cublas"), index

    rng, kept = np.random.default_rng(0), []
    for i in range(12):
        a = np.tril(rng.standard_normal((64, 64))) / 64 + 2 * np.eye(64)
        x, alpha = rng.standard_normal(64), rng.standard_normal()
        out = step(*map(jnp.asarray, (a, x, alpha)))
        kept.append((out, jnp.zeros((i + 1) * 12345, jnp.int8)))
        for _ in range(3):
            x = np.linalg.solve(a, alpha * (a @ x) + 0.5 * x)
        np.testing.assert_allclose(out[0], np.stack([x, -x], 1), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(out[1], x @ x, rtol=1e-10)
        assert out[2] == np.argmax(np.abs(x))


def test_several_threads():
    """Handles go from call to call and are never shared."""
    rng = np.random.default_rng(0)
    a, x = rng.standard_normal((256, 256)), rng.standard_normal((16, 256))
    f = jax.jit(lambda a, x: blas.nrm2(blas.gemv(a, x, implementation="cublas")))
    expected = np.linalg.norm(x @ a.T, axis=1)

    def run(i):
        with jax.enable_x64(True):  # Holds for one thread.
            for _ in range(20):
                np.testing.assert_allclose(f(a, x[i]), expected[i], rtol=1e-12)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(16)))


def test_the_same_bits_each_time():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1_000_003), jnp.float32)
    for f in (blas.nrm2, blas.asum, lambda x, **kw: blas.dot(x, x, **kw)):
        bits = {np.asarray(f(x, implementation="cublas")).tobytes() for _ in range(10)}
        assert len(bits) == 1


def test_donated_arrays_are_updated_in_place():
    y = jnp.ones((1024, 1024))
    pointer = y.unsafe_buffer_pointer()
    f = jax.jit(lambda x, y: blas.gemm(x, x, y, implementation="cublas"), donate_argnums=1)
    out = f(jnp.eye(1024), y)
    assert out.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(out, np.ones((1024, 1024)) + np.eye(1024))


def test_cublas_is_chosen_and_found():
    (call,) = jax_tcgemm.explain(blas.gemv, jnp.ones((3, 3)), jnp.ones(3))
    assert call.implementation == "cublas"
    assert jax_tcgemm.info().versions["cuBLAS"][0].isdigit()


def test_what_cublas_lacks_is_refused_by_name():
    x = jnp.eye(4, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="cuBLAS has no trsm of bf16"):
        blas.trsm(x, x, implementation="cublas")


def test_logging(tmp_path, run_python):
    log = tmp_path / "cublas.log"
    run_python(
        f"""
import jax.numpy as jnp
from jax_tcgemm import blas
blas.set_logging({str(log)!r})
blas.gemv(jnp.eye(3), jnp.ones(3), implementation="cublas").block_until_ready()
blas.set_logging(None)
""",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    assert "gemv" in log.read_text()
