"""The CUDA kernels run by the emulator of tests/emulator: what they compute, without a GPU.

A seed says in which order threads go on and when asynchronous operations happen. Tested here
are the configs that shipped tables name and a few more; test_kernels_emulated_all.py has them all.
"""

import dataclasses
import itertools

import emulated
import numpy as np
import pytest
import ragged_reference as reference
from emulated import Emulator
from emulated_checks import (
    BF16,
    CASE,
    TF32,
    Case,
    Types,
    check,
    check_ragged,
    group_arrays,
    integers,
    ragged_problem,
)
from gpu.gemm_call import make_inputs

from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.problem.rows import RowsProblem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

WGMMA = [
    ("64x64x64_c1x1x1_pp", BF16, "NN", "one_off_a_tile"),
    ("64x64x64_c1x1x1_pp_split3", BF16, "NN", "all_odd"),
    ("64x64x64_c1x1x1_pp", BF16, "NN", "odd_overlap"),
    ("64x64x64_c1x1x1_pp", BF16, "NN", "no_k"),
    ("64x64x64_c1x1x1_pp", BF16, "NN", "batch_of_2_by_3_one_a_for_3"),
    ("64x64x64_c1x1x1_pp", BF16, "NN", "alpha_beta_odd_batch"),
    ("128x128x64_c2x1x1_pp", BF16, "NN", "several_tiles"),
    ("192x176x64_c1x2x1_co_t", BF16, "TN", "several_tiles"),
    ("192x176x64_c1x2x1_co_t", BF16, "TN", "all_odd"),
    ("64x64x64_c1x4x1_pp", BF16, "TN", "odd_overlap"),
    ("64x64x64_c1x4x1_pp", BF16, "TN", "several_tiles"),
    ("64x16x64_c1x1x2_pp_t", BF16, "TN", "several_tiles"),
    ("128x64x64_c1x1x2_co", BF16, "TN", "several_tiles"),
    ("128x64x64_c1x1x2_co", BF16, "TN", "k_below_a_stage"),
    ("128x16x64_c1x1x4_co_t", BF16, "TN", "several_tiles"),
    ("128x128x64_c1x1x1_co", TF32, "TT", "one_off_a_tile"),
    ("128x128x64_c1x1x1_co", TF32, "TN", "k_below_a_stage"),
]


@pytest.mark.parametrize(("config", "types", "layout", "label"), WGMMA)
def test_wgmma(emulator, config, types, layout, label):
    for seed in range(3):
        how = {"implementation": "wgmma", "config": config, "seed": seed}
        check(emulator, types, layout, CASE[label], **how)


@pytest.fixture(scope="session")
def tuned(emulator, run_folder):
    """The kernels that shipped tables name."""
    return Emulator(run_folder / "tuned", *emulated.tuned_tables(), like=emulator)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "product", emulated.tuned_products(), ids=lambda x: "-".join(vars(x).values())
)
def test_wgmma_as_shipped_tables_run_it(tuned, product):
    for seed, case in enumerate(("several_tiles", "odd_overlap")):
        types = TF32 if product.dtype == "f32" else Types(product.dtype, product.dtype, "f32")
        how = {"implementation": "wgmma", "config": product.config, "seed": seed}
        check(tuned, types, product.layout, CASE[case], **how)


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("config", "layout"),
    [("128x128x64_c2x1x1_pp", "NN"), ("192x176x64_c1x2x1_co_t", "TN")],
)
def test_wgmma_rows_that_start_anywhere(emulator, config, layout, out):
    """Every place in a sector of L2, and every number of elements in a tile's last one."""
    for i in range(1, 18):
        case = Case(f"rows_{i}", 37 + i, 128 + i, 24, batch=(1, 1 + i % 3))
        how = {"implementation": "wgmma", "config": config, "seed": i}
        check(emulator, Types("bf16", out, "f32"), layout, case, **how)


def test_an_elements_sum_does_not_depend_on_its_place(emulator):
    """Tiles that overlap compute an element twice, in warpgroups whose sums other blocks add up."""
    case = Case("overlap", 24, 200, 1280)
    inputs = make_inputs(Types("bf16", "f32", "f32"), "TN", case, real=True)
    how = {"implementation": "wgmma", "config": "128x16x64_c1x1x4_co_t"}

    def run(b):
        return emulator.run(inputs.problem, {"a": inputs.a, "b": b}, **how)[0]

    b = inputs.b.reshape(case.k, case.n)
    d = run(b)
    for shift in (40, 72, 128):
        np.testing.assert_array_equal(run(np.roll(b, shift, 1)), np.roll(d, shift, -1))


def test_ping_pong_waits_for_warps_that_are_slow(emulator):
    # With one k block a tile nothing but the turn keeps the warps of a warpgroup together.
    how = {"implementation": "wgmma", "config": "64x64x64_c1x1x1_pp", "loose_warpgroups": True}
    for seed in range(3):
        check(emulator, BF16, "NN", Case("one_k_block", 320, 320, 64), num_sms=2, seed=seed, **how)


SIZES = [1, 0, 17, 64, 63]


@pytest.mark.parametrize("config", ["128x64x64_c1x1x1_co_t", "128x256x64_c2x1x1_co_t"])
@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_rows(emulator, config, seed):
    how = {"implementation": "wgmma", "config": config, "seed": seed}
    check_ragged(emulator, "rows", SIZES, 160, 264, 136, **how)


@pytest.mark.parametrize("seed", range(3))
def test_wgmma_ragged_contraction(emulator, seed):
    how = {"implementation": "wgmma", "config": "128x256x64_c2x1x1_co", "seed": seed}
    check_ragged(emulator, "contraction", SIZES, 136, 136, 160, **how)


@pytest.mark.parametrize("seed", range(3))
def test_wgmma_gathered_rows(emulator, seed):
    """Indices of no row, too, whose tokens are zero."""
    m, n, k, num_rows, sizes = 130, 264, 136, 50, [1, 0, 70, 17, 33]
    rng = np.random.default_rng(seed)
    a, b = integers(rng, (num_rows, k)), integers(rng, (len(sizes), k, n))
    gather = rng.integers(-2, num_rows + 2, m).astype(np.int32)
    problem = ragged_problem("rows", len(sizes), m, n, k, gathered=True, a_rows=num_rows)
    arrays = {"a": a, "b": b, "gather": gather, **group_arrays(sizes)}
    inside = (gather >= 0) & (gather < num_rows)
    tokens = np.where(inside[:, None], a[np.where(inside, gather, 0)], 0)
    expected = reference.rows(tokens, b, sizes)
    how = {"implementation": "wgmma", "config": "256x128x64_c1x2x1_co_t", "seed": seed}
    np.testing.assert_array_equal(emulator.run(problem, arrays, **how)[0][0], expected)


def test_wgmma_refuses_for_what_no_config_runs_first(emulator):
    """Not for what another config could run, which is of no use to know."""
    problem = RaggedProblem(
        *("rows", 1, 9, 5, 8, 1, 1, False, True, True, True, "bf16", "bf16", "f32"),
        gathered=True,
        a_rows=9,
    )
    config = "128x256x64_c2x1x1_co_t"
    with pytest.raises(RuntimeError, match="n must be a multiple of 8, got 5"):
        emulator.run(problem, {}, implementation="wgmma", config=config)
    problem = dataclasses.replace(problem, n=8)
    with pytest.raises(RuntimeError, match=f"config {config} has no gathered rows"):
        emulator.run(problem, {}, implementation="wgmma", config=config)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("n", [1, 40, 1096, 2100])
@pytest.mark.parametrize("many_targets", [False, True], ids=["", "many_targets"])
def test_rows(emulator, many_targets, n, dtype):
    """Rows of whole vectors and not; indices of no row; targets without a pair."""
    rng = np.random.default_rng(n)
    a, b = (integers(rng, (rows, n), dtype) for rows in (9, 7))
    indices, b_indices = (rng.integers(-1, rows + 1, 40).astype(np.int32) for rows in (9, 7))
    weights = integers(rng, 40, "f32")
    starts = np.array([0, 3, 3, 12, *(many_targets * 8 * [28]), 40], np.int32)
    wide_a, wide_b = (np.vstack([x, np.zeros((1, n))]).astype(np.float64) for x in (a, b))
    x = wide_a[np.where((indices >= 0) & (indices < 9), indices, 9)]
    y = wide_b[np.where((b_indices >= 0) & (b_indices < 7), b_indices, 7)]
    how = {"implementation": "simt", "config": "default"}

    sums = RowsProblem("sums", 9, 0, len(starts) - 1, 40, n, True, dtype)
    arrays = {"a": a, "indices": indices, "starts": starts, "weights": weights}
    expected = np.stack(
        [(weights[i:j, None] * x[i:j]).sum(0) for i, j in itertools.pairwise(starts)]
    )
    np.testing.assert_array_equal(emulator.run(sums, arrays, **how)[0], expected)

    dots = RowsProblem("dots", 9, 7, 0, 40, n, False, dtype)
    arrays = {"a": a, "b": b, "indices": indices, "b_indices": b_indices}
    np.testing.assert_array_equal(emulator.run(dots, arrays, **how)[0], (x * y).sum(1))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_mma_sync(emulator, layout):
    for seed, label in enumerate(["one_off_a_tile", "all_odd"]):
        how = {"implementation": "mma_sync", "config": "64x64x64_w32x32_s4", "seed": seed}
        check(emulator, BF16, layout, CASE[label], **how)
        how["config"] = "64x64x128_w32x32_s4"
        check(emulator, Types("s8,u8", "s32", "s32"), layout, CASE[label], **how)


def test_a_kernel_that_nobody_brought_is_named(emulator):
    """With the architecture that it would have to be compiled for."""
    how = {"implementation": "mma_sync", "config": "128x256x64_w64x64_s3"}
    missing = "the program must bring the kernel .*gemm_kernel<.*Config<128, 256, .* for sm_90"
    with pytest.raises(RuntimeError, match=missing):
        check(emulator, BF16, "NN", CASE["all_odd"], **how)


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_mma_sync_ragged(emulator, form):
    how = {"implementation": "mma_sync", "config": "128x128", "seed": 2}
    extents = (160, 37, 45) if form == "rows" else (45, 37, 160)
    check_ragged(emulator, form, SIZES, *extents, **how)


def test_simt(emulator):
    how = {"implementation": "simt_tiled", "config": "128x64x16", "seed": 1}
    check(emulator, Types("f32", "bf16", "f32"), "TN", CASE["alpha_beta_odd_batch"], **how)
