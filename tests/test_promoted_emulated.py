"""wgmma kernels that promote accumulators of bfloat16, emulated: values, and that they promote."""

import emulated
import numpy as np
import pytest
from emulated import Emulator, carried
from emulated_checks import CASE, NO_PROMOTION, check
from gpu.gemm_call import Case, Types
from kernel_instances import wgmma
from mistakes import Mistake

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection.configs import WgmmaConfig

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

PROMOTED = Types("bf16", "f32", "f32_promoted")
# A tile in one part, in two of its columns, and in two of its rows.
COOPERATIVE, COLUMNS = "128x128x64_c1x1x1_co", "128x256x64_c2x1x1_co"
ROWS = "128x128x64_c1x1x1_pp"
CONFIGS = {
    COOPERATIVE: "128, 128, 1, 1, 1, false, false",
    COLUMNS: "128, 256, 2, 1, 1, false, false",
    ROWS: "128, 128, 1, 1, 1, true, false",
    "64x96x64_c1x1x1_pp_t": "64, 96, 1, 1, 1, true, true",
}
# Majorness of A and B in the kernel by layout: "0" is K-major, which B must be in two parts.
LAYOUTS = {"NT": "00", "NN": "01", "TN": "11"}
PAIRS = [(x, y) for x in CONFIGS for y in LAYOUTS if x != COLUMNS or y == "NT"]
CASE |= {"ten_k_tiles": Case("ten_k_tiles", 136, 264, 640)}


def kernel(config, layout="00", instruction="bf16 promoted"):
    return carried(wgmma(config, "Bare", instruction, layout=layout))


@pytest.fixture(scope="session")
def kernels(run_folder):
    """Kernels of all tests here."""
    sources = []
    for name, layout in PAIRS:
        own = LAYOUTS[layout][::-1] if WgmmaConfig.parse(name).swap_ab else LAYOUTS[layout]
        sources.append(kernel(CONFIGS[name], own))
    sources += [kernel(CONFIGS[COOPERATIVE], instruction="bf16")]
    return Emulator(run_folder / "promoted", *sources)


@pytest.mark.parametrize("label", ["ten_k_tiles", "all_odd", "no_k", "batch_of_2_by_3_one_a_for_3"])
@pytest.mark.parametrize(("config", "layout"), PAIRS)
def test_configs(kernels, config, layout, label):
    check(kernels, PROMOTED, layout, CASE[label], implementation="wgmma", config=config, seed=1)


def positive_sums(emulator, compute="f32_promoted"):
    """Errors of sums of 4096 positive products, in units of float32's last place."""
    m, n, k = 128, 128, 4096
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(0.5, 1, (rows, k)).astype(DTYPES["bf16"]) for rows in (m, n))
    operands = Operand("bf16", False, k), Operand("bf16", True, k)
    problem = Problem(1, 1, m, n, k, *operands, "f32", compute)
    how = {"implementation": "wgmma", "config": COOPERATIVE}
    got = emulator.run(problem, {"a": a, "b": b}, **how)[0].reshape(m, n)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    return np.abs(got - exact).max() / np.spacing(np.float32(exact.min()))


def test_accumulators_are_promoted(kernels):
    """The tensor core cuts off each of 256 steps; of promoted accumulators each of four."""
    assert positive_sums(kernels) < 16
    assert positive_sums(kernels, "f32") > 32


def test_parts_of_columns_need_a_k_major_b(kernels):
    with pytest.raises(RuntimeError, match="for which B must be K-major"):
        check(kernels, PROMOTED, "NN", CASE["all_odd"], implementation="wgmma", config=COLUMNS)


MULTIPLY = "kernels/wgmma/multiply.cuh"
MISTAKES = [
    Mistake(MULTIPLY, "not_started_anew", "false", "true"),
    Mistake("kernels/wgmma/scales.cuh", "not_added", "+=", "="),
    Mistake(MULTIPLY, "half_of_the_columns", " + column * 128", ""),
    Mistake(MULTIPLY, "half_of_the_rows", " + block * 8192", "", ROWS),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(kernels, mistake, tmp_path):
    config = mistake.case or COLUMNS
    wrong = Emulator(tmp_path, kernel(CONFIGS[config]), mistakes=[mistake], like=kernels)
    how = {"implementation": "wgmma", "config": config, "seed": 1}
    with pytest.raises((AssertionError, RuntimeError)):
        check(wrong, PROMOTED, "NT", CASE["ten_k_tiles"], **how)


def test_sums_that_are_not_promoted_are_found(kernels, tmp_path):
    wrong = Emulator(tmp_path, kernel(CONFIGS[COOPERATIVE]), mistakes=NO_PROMOTION, like=kernels)
    assert positive_sums(wrong) > 32
