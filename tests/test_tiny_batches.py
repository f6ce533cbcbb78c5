"""Which batches of tiny matrices run on simt_batched; without a GPU."""

import numpy as np
import pytest

from jax_tcgemm import selection
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import tables, tiny_batches, xla_forms

GPU = selection.ASSUMED_GPU
OURS = "simt_batched/default"
BROADCAST = "xla/broadcast"


@pytest.fixture
def fake_batched(fake_cuda):
    """A _cuda module that has simt_batched and what the cost model knows; no tables."""
    fake_cuda.implementations = lambda: {
        "wgmma": ["128x256x64_c2x1x1_co", "64x64x64_c1x1x1_pp"],
        "cublaslt": ["heuristic0"],
        "simt_batched": ["default"],
    }
    tables.reset()
    yield fake_cuda
    tables.reset()


def product(batch, m, n, k, layout="NN", dtype="f32", compute="f32"):
    a = Operand(dtype, layout[0] == "T", m if layout[0] == "T" else k, 0, m * k)
    b = Operand(dtype, layout[1] == "T", k if layout[1] == "T" else n, 0, k * n)
    return Problem(batch, batch, m, n, k, a, b, dtype, compute)


def chosen(problem):
    choice = selection.select(CallOptions("matmul"), problem, GPU)
    return f"{choice.implementation}/{choice.config}"


@pytest.mark.parametrize(
    "problem",
    [
        product(39017, 11, 11, 11, "NT"),
        product(39017, 11, 11, 11, "NT", compute="tf32"),
        product(105025, 15, 9, 15),
        product(200000, 8, 8, 8, "NT"),
        product(200000, 6, 6, 12),
        product(60000, 20, 20, 20, "TN", "f64", "f64"),
        product(60000, 20, 20, 20, "TT"),
        product(100000, 16, 16, 16, "NN", "c64"),
        product(21546, 9, 9, 9, "NN", "f64", "f64"),
        product(50000, 6, 6, 6, "TT", "c64"),
        product(40000, 3, 14, 14, "NN", "bf16"),
    ],
    ids=str,
)
def test_large_batches_run_on_it(fake_batched, problem):
    assert chosen(problem) == OURS


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (product(1000, 11, 11, 11, "NT"), BROADCAST),
        (product(5000, 11, 11, 11, "NT"), BROADCAST),
        (product(200000, 8, 8, 8), BROADCAST),
        (product(900, 32, 32, 32), "xla/default"),
        (product(200000, 4, 4, 4, "TN", "bf16"), BROADCAST),
        (product(3000, 32, 32, 32, "NT", "c64"), "xla/default"),
    ],
    ids=str,
)
def test_xla_keeps_what_is_small_or_along_rows(fake_batched, problem, name):
    assert chosen(problem) == name


def test_it_is_compared_with_tensor_cores(fake_batched):
    """Where the cost model knows others, the shortest estimate decides."""
    problem = product(100000, 24, 24, 24, "NT", "f32", "tf32")
    order = dict(selection.ranked(problem, GPU))
    times = {x.implementation: us for x, us in order.items() if us is not None}
    assert times.keys() >= {"simt_batched", "cublaslt"}
    best = min(times, key=lambda x: times[x] * (1.1 if x != "xla" else 1))
    assert chosen(problem).startswith(best)


def test_a_build_without_it(fake_batched):
    implementations = fake_batched.implementations()
    fake_batched.implementations = lambda: {
        name: configs for name, configs in implementations.items() if name != "simt_batched"
    }
    assert chosen(product(39017, 11, 11, 11)) == BROADCAST
    assert chosen(product(60000, 20, 20, 20)) == "xla/default"


def test_a_kernel_that_cannot_be_compiled(fake_batched):
    fake_batched.rejects["simt_batched"] = "this build lacks the kernel, and NVRTC is missing"
    assert chosen(product(39017, 11, 11, 11)) == BROADCAST
    assert chosen(product(60000, 20, 20, 20)) == "xla/default"


def test_the_estimate(fake_batched):
    """Memory at 80 % of its bandwidth, or multiply-adds where they take longer; and a launch."""
    problem = product(39017, 11, 11, 11, "NT")
    bytes_per_us = 4e6
    memory = 39017 * 3 * 121 * 4 / (0.8 * bytes_per_us)
    np.testing.assert_allclose(
        tiny_batches.estimated_us(problem, 132, bytes_per_us), 3 + memory, rtol=1e-12
    )
    heavy = product(10000, 32, 32, 32, "NN", "f16")
    arithmetic = 10000 * 32**3 / (64 * 1700 * 132)
    np.testing.assert_allclose(
        tiny_batches.estimated_us(heavy, 132, bytes_per_us), 3 + arithmetic, rtol=1e-12
    )
    loop = xla_forms.broadcast_us(problem, bytes_per_us)
    assert loop > 4 * tiny_batches.estimated_us(problem, 132, bytes_per_us)
