"""The CUDA kernels run by the emulator of tests/emulator: what they compute, without a GPU.

Inputs are small integers, which are added without rounding, so that results are compared for
equality. Seeds choose the order of threads and the delay of what is asynchronous.
"""

import itertools

import emulated
import numpy as np
import pytest
import ragged_reference as reference

from jax_tcgemm.problem import DTYPES
from jax_tcgemm.ragged_problem import RaggedProblem
from jax_tcgemm.rows_problem import RowsProblem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())


@pytest.fixture(scope="session")
def wgmma(tmp_path_factory):
    return emulated.Emulator(
        tmp_path_factory.mktemp("wgmma"),
        "kernels/wgmma/ragged_instance_bf16_1.cu",
        "kernels/wgmma/ragged_fused_instance_bf16.cu",
        families=("wgmma", "rows"),
    )


def integers(rng, shape, dtype="bf16"):
    return rng.integers(-2, 2, shape, endpoint=True).astype(DTYPES[dtype])


def check_ragged(emulator, form, sizes, m, n, k, *, transposed=False, dtype="bf16", **how):
    """One call with fresh inputs, compared with the reference."""
    rng = np.random.default_rng([m, n, k, *sizes])
    rows, groups = form == "rows", len(sizes)
    problem = RaggedProblem(
        form=form,
        batch=1,
        m=m,
        n=n,
        k=k,
        groups=groups,
        num_sizes=groups,
        b_transposed=transposed,
        a_batched=True,
        b_batched=True,
        sizes_batched=True,
        in_dtype=dtype,
        out_dtype="f32",
        compute="tf32" if dtype == "f32" else "f32",
    )
    a = integers(rng, (m, k) if rows else (k, m), dtype)
    b = integers(rng, (groups, k, n) if rows else (k, n), dtype)
    # Tokens of no group, which follow the last one's.
    for tokens in (a,) if rows else (a, b):
        tokens[sum(sizes) :] = np.nan
    expected = (reference.rows if rows else reference.contraction)(a, b, sizes)
    arrays = {
        "a": a,
        "b": np.ascontiguousarray(b.swapaxes(1, 2)) if transposed else b,
        "group_sizes": np.array(sizes, np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    got = emulator.run(problem, arrays, **how)[0][0]
    np.testing.assert_array_equal(got, expected)


SIZES = [1, 0, 17, 64, 33]


@pytest.mark.parametrize(
    "config", ["128x64x64_c1x1x1_co_t", "128x256x64_c2x1x1_co_t", "128x256x64_c2x1x1_co_t_w"]
)
@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_rows(wgmma, config, seed):
    how = {"implementation": "wgmma", "config": config, "seed": seed}
    check_ragged(wgmma, "rows", SIZES, 130, 264, 136, **how)


@pytest.mark.parametrize(
    "config", ["128x256x64_c2x1x1_co", "128x256x64_c2x1x1_co_w", "128x128x64_c2x1x1_pp_w"]
)
@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_contraction(wgmma, config, seed):
    how = {"implementation": "wgmma", "config": config, "seed": seed}
    check_ragged(wgmma, "contraction", SIZES, 136, 136, 130, **how)


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_epilogues(wgmma, seed, gathered, gated):
    """Bias and activation, of both configs; indices of no row, whose tokens are zero."""
    m, n, k, num_rows, sizes = 130, 264, 136, 50, [1, 0, 70, 17, 33]
    groups, halves = len(sizes), (2,) if gated else ()
    rng = np.random.default_rng(seed)
    a = integers(rng, (num_rows if gathered else m, k))
    b = integers(rng, (groups, k, *halves, n))
    bias = integers(rng, (groups, *halves, n), "f32")
    gather = rng.integers(-2, num_rows + 2, m).astype(np.int32)
    problem = RaggedProblem(
        form="rows",
        batch=1,
        m=m,
        n=n,
        k=k,
        groups=groups,
        num_sizes=groups,
        b_transposed=False,
        a_batched=True,
        b_batched=True,
        sizes_batched=True,
        in_dtype="bf16",
        out_dtype="f32",
        compute="f32",
        activation="relu",
        gated=gated,
        biased=True,
        bias_dtype="f32",
        gathered=gathered,
        a_rows=num_rows if gathered else 0,
    )
    arrays = {
        **{"a": a, "b": b, "bias": bias},
        "group_sizes": np.array(sizes, np.int32),
        "group_offset": np.zeros(1, np.int32),
    }
    tokens = a
    if gathered:
        arrays["gather"] = gather
        inside = (gather >= 0) & (gather < num_rows)
        tokens = np.where(inside[:, None], a[np.where(inside, gather, 0)], 0)
    z = reference.rows(tokens, b.reshape(groups, k, -1), sizes).reshape(m, *halves, n)
    z[: sum(sizes)] += np.repeat(bias, sizes, 0)
    expected = np.maximum(z[:, 0], 0) * z[:, 1] if gated else np.maximum(z, 0)
    configs = ["256x128x64_c1x1x1_co_t"]
    if not gathered:
        configs.append("256x128x64_c2x1x1_co_t")
    for config in configs:
        how = {"implementation": "wgmma", "config": config, "seed": seed}
        np.testing.assert_array_equal(wgmma.run(problem, arrays, **how)[0][0], expected)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("n", [1, 40, 2100])
def test_rows(wgmma, n, dtype):
    """Rows of whole vectors and not; indices of no row; targets without a pair."""
    rng = np.random.default_rng(n)
    a, b = (integers(rng, (rows, n), dtype) for rows in (9, 7))
    indices, b_indices = (rng.integers(-1, rows + 1, 40).astype(np.int32) for rows in (9, 7))
    weights = integers(rng, 40, "f32")
    starts = np.array([0, 3, 3, 12, 40], np.int32)
    wide_a, wide_b = (np.vstack([x, np.zeros((1, n))]).astype(np.float64) for x in (a, b))
    x = wide_a[np.where((indices >= 0) & (indices < 9), indices, 9)]
    y = wide_b[np.where((b_indices >= 0) & (b_indices < 7), b_indices, 7)]
    how = {"implementation": "simt", "config": "default"}

    sums = RowsProblem("sums", 9, 0, 4, 40, n, True, dtype)
    arrays = {"a": a, "indices": indices, "starts": starts, "weights": weights}
    expected = np.stack(
        [(weights[i:j, None] * x[i:j]).sum(0) for i, j in itertools.pairwise(starts)]
    )
    np.testing.assert_array_equal(wgmma.run(sums, arrays, **how)[0], expected)

    dots = RowsProblem("dots", 9, 7, 0, 40, n, False, dtype)
    arrays = {"a": a, "b": b, "indices": indices, "b_indices": b_indices}
    np.testing.assert_array_equal(wgmma.run(dots, arrays, **how)[0], (x * y).sum(1))
