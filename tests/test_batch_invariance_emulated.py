"""wgmma kernels, emulated: a config adds up a row in one order, whatever rows are beside it."""

import emulated
import numpy as np
import pytest
from emulated import Emulator, carried
from emulated_checks import group_arrays, ragged_problem
from kernel_instances import wgmma, wgmma_ragged

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

CONFIGS = {
    "128x128x64_c1x1x1_co": "128, 128, 1, 1, 1, false, false",
    "64x64x64_c1x1x2_pp": "64, 64, 1, 1, 2, true, false",
    "64x96x64_c1x1x1_pp_t": "64, 96, 1, 1, 1, true, true",
}
CONFIGS_APART = {
    "128x128x64_c1x1x1_co": "128x128x64_c1x1x1_co_split2",
    "64x64x64_c1x1x2_pp": "128x128x64_c1x1x1_co",
}
GROUPED = {"128x64x64_c1x1x1_co_t": "128, 64, 1, 1, 1, false, true"}
ROWS = (1, 7, 64, 65, 133)
M, N, K = 200, 104, 328


@pytest.fixture(scope="session")
def kernels(run_folder):
    # Of those that end in _t the operands are exchanged.
    layouts = {config: "10" if config.endswith("true") else "01" for config in CONFIGS.values()}
    sources = [carried(wgmma(config, layout=layout)) for config, layout in layouts.items()]
    sources += [carried(wgmma_ragged(config)) for config in GROUPED.values()]
    return Emulator(run_folder / "batch_invariance", *sources)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES["bf16"])


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("splits", ["", "_split3"])
@pytest.mark.parametrize("config", CONFIGS)
def test_rows(kernels, config, splits):
    a, b = draw(0, M, K), draw(1, K, N)

    def run(rows):
        operands = Operand("bf16", False, K), Operand("bf16", False, N)
        problem = Problem(1, 1, rows, N, K, *operands, "f32", "f32")
        how = {"implementation": "wgmma", "config": config + splits, "seed": rows}
        return np.asarray(kernels.run(problem, {"a": a[:rows], "b": b}, **how)[0]).reshape(rows, N)

    among_all = run(M)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(among_all, exact, atol=1e-4)
    # Sums are rounded, so that another order would show.
    assert (among_all != exact.astype(np.float32)).any()
    for rows in ROWS:
        np.testing.assert_array_equal(bits(run(rows)), bits(among_all[:rows]))


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ("128x128x64_c1x1x1_co", ["64x96x64_c1x1x1_pp_t"]),
        ("64x64x64_c1x1x2_pp", ["128x128x64_c1x1x1_co_split2", "64x96x64_c1x1x1_pp_t_split2"]),
    ],
)
def test_configs_that_divide_k_alike(kernels, config, others):
    """What `considered_alike` takes for one another."""
    a, b = draw(4, M, K), draw(5, K, N)
    operands = Operand("bf16", False, K), Operand("bf16", False, N)
    problem = Problem(1, 1, M, N, K, *operands, "f32", "f32")

    def run(config):
        return kernels.run(problem, {"a": a, "b": b}, implementation="wgmma", config=config)[0]

    first = run(config)
    for other in others:
        np.testing.assert_array_equal(bits(run(other)), bits(first))
    # Another division shows.
    assert (run(CONFIGS_APART[config]) != first).any()


@pytest.mark.parametrize("config", GROUPED)
def test_groups(kernels, config):
    a, b = draw(2, M, K), draw(3, 3, K, N)

    def run(sizes):
        problem = ragged_problem("rows", 3, M, N, K)
        arrays = {"a": a, "b": b, **group_arrays(sizes)}
        how = {"implementation": "wgmma", "config": config, "seed": sum(sizes[:1])}
        return np.asarray(kernels.run(problem, arrays, **how)[0]).reshape(M, N)

    of_one_group = [run(M * np.eye(3, dtype=int)[group]) for group in range(3)]
    for sizes in ([1, 150, 49], [70, 0, 130], [63, 65, 72]):
        got, of_row = run(sizes), np.repeat(np.arange(3), sizes)
        expected = np.stack([of_one_group[group][row] for row, group in enumerate(of_row)])
        np.testing.assert_array_equal(bits(got), bits(expected))
