"""Products of an array and its own transpose: recognized when they are lowered."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm import tensor
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.selection import devices, implementations
from jax_tcgemm.selection.cost_model import library_cost, prediction
from jax_tcgemm.selection.devices import ASSUMED_GPU
from jax_tcgemm.selection.implementations import Candidate
from jax_tcgemm.system import modules

X = jax.ShapeDtypeStruct((512, 768), jnp.bfloat16)
STACK = jax.ShapeDtypeStruct((3, 512, 768), jnp.bfloat16)


def problems(f, *args):
    return [call.problem for call in jax_tcgemm.explain(f, *args, platform="cuda")]


def cube(x):
    """A product whose rows are two dimensions of the array."""
    y = x.reshape(8, 64, 768)
    return jax_tcgemm.dot_general(y, y, (((2,), (2,)), ((), ())))


SYMMETRIC = {
    "rows": lambda x: jax_tcgemm.matmul(x, x.T),
    "columns": lambda x: jax_tcgemm.matmul(x.T, x),
    "two transposes": lambda x: jax_tcgemm.matmul(x.T.T, jnp.swapaxes(x, 0, 1)),
    "dimension numbers": lambda x: jax_tcgemm.dot_general(x, x, (((1,), (1,)), ((), ()))),
    "two dimensions": cube,
    "scaled": lambda x: jax_tcgemm.matmul(x, x.T, alpha=0.5),
    "activated": lambda x: jax_tcgemm.linear(x, x.T, activation="relu"),
    "float32 results": lambda x: jax_tcgemm.matmul(x, x.T, preferred_element_type=jnp.float32),
}
OTHERS = {
    "square": (lambda x: jax_tcgemm.matmul(x, x), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)),
    "two arrays": (lambda x: jax_tcgemm.matmul(x, (2 * x).T), X),
    "bias": (lambda x: jax_tcgemm.linear(x, x.T, jnp.ones(512)), X),
    "residual": (lambda x: jax_tcgemm.linear(x, x.T, residual=jnp.ones((512, 512))), X),
    "small": (lambda x: jax_tcgemm.matmul(x[:128], x[:128].T), X),
    "rows by other rows": (lambda x: jax_tcgemm.matmul(x[:256], x[256:].T), X),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_recognized(name):
    (problem,) = problems(SYMMETRIC[name], X)
    assert problem.symmetric
    assert problem.flops == problem.m * (problem.m + 1) * problem.k


@pytest.mark.parametrize("name", OTHERS)
def test_not_recognized(name):
    assert not any(problem.symmetric for problem in problems(*OTHERS[name]) if problem)


def test_batches():
    (problem,) = problems(lambda x: jax_tcgemm.matmul(x, jnp.swapaxes(x, 1, 2)), STACK)
    assert problem.symmetric
    assert problem.batch == 3
    (problem,) = problems(jax.vmap(SYMMETRIC["rows"]), STACK)
    assert problem.symmetric
    assert problem.batch == 3


CONTRACTIONS = {
    "rows": lambda x: tensor.einsum("ik,jk->ij", x, x),
    "columns": lambda x: tensor.einsum("ki,kj->ij", x, x),
    "exchanged": lambda x: tensor.einsum("ik,jk->ji", x, x),
    "two summed": lambda x: tensor.einsum("ikl,jkl->ij", *[x.reshape(512, 64, 12)] * 2),
    "two of rows": lambda x: tensor.einsum("ijk,lmk->ijlm", *[x.reshape(8, 64, 768)] * 2),
    "scaled": lambda x: tensor.contract("ik,jk->ij", x, x, alpha=0.5),
    "added to": lambda x: tensor.contract(
        "ik,jk->ij", x, x, c=jnp.ones((512, 512), x.dtype), beta=1
    ),
    "forced": lambda x: tensor.einsum("ik,jk->ij", x, x, implementation="gemm"),
    "three arrays": lambda x: tensor.einsum("ik,jk,->ij", x, x, jnp.ones((), x.dtype)),
}
OTHER_CONTRACTIONS = {
    "square": lambda x: tensor.einsum("ik,kj->ij", x[:, :512], x[:, :512]),
    "two arrays": lambda x: tensor.einsum("ik,jk->ij", x, 2 * x),
    "small": lambda x: tensor.einsum("ik,jk->ij", x[:128], x[:128]),
    "permuted rows": lambda x: tensor.einsum("ijk,lmk->ijml", *[x.reshape(8, 64, 768)] * 2),
    "one operand conjugated": lambda x: tensor.contract(
        "ik,jk->ij", *[x.astype(jnp.complex64)] * 2, op_b="conj"
    ),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_of_one_array(name):
    calls = jax_tcgemm.explain(CONTRACTIONS[name], X, platform="cuda")
    (call,) = (call for call in calls if call.problem.flops > 1e8)
    assert call.problem.symmetric
    assert str(call.problem).endswith(" symmetric")
    n, k = (768, 512) if name == "columns" else (512, 768)
    assert call.flops == n * (n + 1) * k


def test_contractions_of_one_array_are_faster():
    """The cost model selects the kernel, because only the kernel computes half."""
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    (half,) = jax_tcgemm.explain(CONTRACTIONS["columns"], x, platform="cuda")
    (whole,) = jax_tcgemm.explain(
        functools.partial(tensor.einsum, "ki,kj->ij"), x, x, platform="cuda"
    )
    assert half.implementation == "gemm"
    us = [float(re.search(r"([0-9.]+) us", call.why)[1]) for call in (half, whole)]
    assert us[0] < 0.65 * us[1]


def test_contractions_in_batches():
    f = functools.partial(tensor.einsum, "bik,bjk->bij")
    (call,) = jax_tcgemm.explain(lambda x: f(x, x), STACK, platform="cuda")
    assert call.problem.symmetric
    assert call.flops == 3 * 512 * 513 * 768
    (call,) = jax_tcgemm.explain(jax.vmap(CONTRACTIONS["rows"]), STACK, platform="cuda")
    assert call.problem.symmetric


@pytest.mark.parametrize("name", OTHER_CONTRACTIONS)
def test_contractions_without_symmetry(name):
    (call,) = jax_tcgemm.explain(OTHER_CONTRACTIONS[name], X, platform="cuda")
    assert not call.problem.symmetric


def test_contractions_of_the_same_types(fake_cuda):
    """The lowering of one call is not kept for another, of other arrays of the same types."""

    def f(x, y):
        product = functools.partial(tensor.einsum, "ik,jk->ij", implementation="gemm")
        return product(x, y), product(x, x), product(y, x), product(y, y)

    text = jax.jit(f).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("symmetric = true") == 2
    assert text.count("symmetric = false") == 2


def test_values_of_contractions():
    x = np.random.default_rng(0).normal(size=(3, 300, 40)).astype(np.float32)
    got = jax.jit(lambda x: tensor.einsum("bik,bjk->bij", x, x))(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, wide @ wide.swapaxes(1, 2), rtol=1e-4, atol=1e-4)


def test_gradients_are_products_of_two_arrays():
    def loss(x):
        return jnp.sum(jnp.sin(jax_tcgemm.matmul(x, x.T).astype(jnp.float32)))

    first, *others = problems(jax.grad(loss), X)
    assert first.symmetric
    assert len(others) == 2
    assert not any(problem.symmetric for problem in others)


@pytest.mark.parametrize("f", [lambda x: x @ x.T, lambda x: jnp.einsum("ki,kj->ij", x, x)])
def test_accelerated(f):
    (call,) = jax_tcgemm.explain(jax_tcgemm.accelerate(f), X, platform="cuda")
    assert call.problem.symmetric
    assert call.implementation == "wgmma"


def test_same_types_of_other_arrays():
    """What is kept of one call's lowering is not another's, of operands of the same types."""
    x, y = (np.random.default_rng(i).normal(size=(300, 40)).astype(np.float32) for i in range(2))

    @jax.jit
    def f(x, y):
        return jax_tcgemm.matmul(x, x.T), jax_tcgemm.matmul(x, y.T), jax_tcgemm.matmul(y, y.T)

    for got, (a, b) in zip(f(x, y), ((x, x), (x, y), (y, y)), strict=True):
        np.testing.assert_allclose(got, a.astype(np.float64) @ b.T, rtol=1e-4, atol=1e-4)


def test_estimates_count_half():
    """The cost model knows which configs compute half, in how many tiles."""
    (problem,) = problems(SYMMETRIC["rows"], jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16))
    (whole,) = problems(
        lambda x, y: jax_tcgemm.matmul(x, y.T),
        *[jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2,
    )
    names = "128x256x64_c2x1x1_co", "128x256x64_c1x1x1_co_t", "64x256x64_c1x1x1_pp"
    half, full = (prediction.predict(p, ASSUMED_GPU.num_sms, names) for p in (problem, whole))
    assert (half.wgmma / full.wgmma)[[0, 2]] == pytest.approx(0.53, abs=0.04)
    assert half.wgmma[1] == full.wgmma[1]
    assert (half.cublaslt, half.xla) == (full.cublaslt, full.xla)


def test_estimates_of_mma_sync_count_half():
    (problem,) = problems(SYMMETRIC["rows"], jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16))

    def us(problem):
        names = "64x64x64_w32x32_s4", "128x256x64_w64x64_s3", "256x128x64_w64x64_s3_k2"
        sms = ASSUMED_GPU.num_sms
        return library_cost.mma_sync_us(problem, sms, library_cost.H200, names)

    def whole(problem):
        return dataclasses.replace(problem, symmetric=False)

    assert us(problem) / us(whole(problem)) == pytest.approx([0.52] * 3, abs=0.06)
    # One square has no tiles above the diagonal.
    (small,) = problems(SYMMETRIC["rows"], jax.ShapeDtypeStruct((256, 8192), jnp.bfloat16))
    assert list(us(small) < us(whole(small))) == [False] * 3


# Of an A100, an L40 and an RTX PRO 6000.
@pytest.mark.parametrize(("capability", "shared"), [(80, 166912), (89, 101376), (120, 101376)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_devices_without_wgmma(monkeypatch, capability, shared, dtype):
    """mma_sync is then first in the order of preference after cuBLASLt, and computes half."""
    gpu = dataclasses.replace(
        ASSUMED_GPU, compute_capability=capability, shared_memory_bytes=shared, name=""
    )
    monkeypatch.setattr(devices, "ASSUMED_GPU", gpu)
    monkeypatch.setattr(modules, "cublaslt_reason", lambda: "it is not there")
    x = jax.ShapeDtypeStruct((2048, 768), dtype)
    (call,) = jax_tcgemm.explain(SYMMETRIC["rows"], x, platform="cuda")
    assert call.problem.symmetric
    assert call.implementation == "mma_sync"
    candidate = Candidate("mma_sync", call.config, "")
    (kernel,) = implementations.kernels(candidate, call.problem, gpu)
    assert kernel.kernel.endswith(", tcgemm::mma::Symmetric<tcgemm::mma::Bare>>")
    assert kernel.target == f"sm_{capability}"
    # Of one square the kernel of any product computes all.
    one = dataclasses.replace(call.problem, m=64, n=64)
    (kernel,) = implementations.kernels(candidate, one, gpu)
    assert kernel.kernel.endswith(", tcgemm::mma::Bare>")


@pytest.mark.parametrize("config", [None, "128x128x64_c1x1x1_pp"])
def test_forced(config):
    options = CallOptions("matmul", "wgmma", config)
    (call,) = jax_tcgemm.explain(
        lambda x: jax_tcgemm.matmul(x, x.T, implementation="wgmma", config=config),
        X,
        platform="cuda",
    )
    assert call.problem.symmetric
    assert call.implementation == options.implementation


def iteration(x):
    """A step of a Newton-Schulz iteration, as optimizers write it."""
    a = x @ x.T
    b = -4.775 * a + 2.0315 * (a @ a)
    return 3.4445 * x + b @ x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("mapped", [False, True])
def test_accelerate_follows_symmetric_matrices(dtype, mapped):
    f, shape = (jax.vmap(iteration), (3, 512, 768)) if mapped else (iteration, (512, 768))
    accelerated = jax_tcgemm.accelerate(f)
    calls = jax_tcgemm.explain(accelerated, jax.ShapeDtypeStruct(shape, dtype), platform="cuda")
    assert [call.problem.symmetric for call in calls] == [True, True, False]
    assert [call.epilogue for call in calls] == [(), ("mul", "add"), ("mul", "add")]
    x = np.random.default_rng(0).normal(size=(*shape[:-2], 30, 40)) / 40
    given = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(accelerated(given), f(given), rtol=1e-5, atol=1e-6)


def rows(a, dimension=0):
    return jax.lax.broadcasted_iota(jnp.int32, a.shape, dimension)


def by_itself(a):
    return a @ a


def cases_of_symmetry():
    half = jnp.float32(0.5)
    return {
        "by itself": (lambda a: a @ a, [True]),
        "of sums": (lambda a: by_itself(a + half * a - 1), [True]),
        "of its transpose": (lambda a: a.T @ a, [True]),
        "of a part": (lambda a: a[:256] @ a[:, :256], [False]),
        "of vectors": (lambda a: by_itself(a + a[0]), [False]),
        "of both": (lambda a: a @ (a + 1), [False]),
        "of three": (lambda a: a @ a @ a + a, [True, True]),
        "of multiples": (lambda a: (half * a) @ a + a, [True]),
        "of sums with numbers": (lambda a: (a + 1) @ a - a, [False]),
        "of products": (lambda a: (a * a) @ a - a, [False]),
        "of quotients": (lambda a: (a / half) @ a - a, [True]),
        "with a diagonal": (lambda a: a @ a + jnp.eye(a.shape[0]), [False]),
        "with indices": (lambda a: jnp.where(rows(a) >= rows(a, 1), a @ a, 0.5), [False]),
        "of integers": (lambda a: a.astype(jnp.int32).astype(a.dtype) @ a - a, [False]),
        "in another dtype": (lambda a: a.astype(jnp.bfloat16).astype(a.dtype) @ a - a, [False]),
        "of inverses": (lambda a: (half / a) @ a - a, [False]),
    }


@pytest.mark.parametrize("name", cases_of_symmetry())
def test_symmetric_matrices_in_programs(name):
    """Products of a symmetric matrix, an array by its own transpose."""
    function, expected = cases_of_symmetry()[name]

    def f(x):
        return function(x @ x.T)

    calls = jax_tcgemm.explain(
        jax_tcgemm.accelerate(f), jax.ShapeDtypeStruct((512, 768), jnp.float32), platform="cuda"
    )
    _, *others = (call.problem is not None and call.problem.symmetric for call in calls)
    assert others == expected
    # No element of x @ x.T is near zero, where its inverse would be that of a rounding error.
    x = jnp.asarray(np.random.default_rng(0).uniform(0.05, 0.4, (300, 40)), jnp.float32)
    np.testing.assert_allclose(jax_tcgemm.accelerate(f)(x), f(x), rtol=1e-4, atol=1e-4)
