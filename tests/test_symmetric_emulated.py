"""wgmma kernels of symmetric products, emulated: half of the tiles, each stored twice."""

import dataclasses

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import symmetric_cases
from emulated import Emulator, carried
from emulated_checks import function_of_product, integers
from kernel_instances import wgmma
from mistakes import Mistake
from mutants import mutants
from symmetric_cases import Case

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.products.newton_schulz import _quadratic

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

SYMMETRIC = "Symmetric<tcgemm::wgmma_family::{}>"
# Squares of one tile, of two above each other, of a cluster, and of three warpgroups.
CONFIGS = {
    "128x128x64_c1x1x1_pp": "128, 128, 1, 1, 1, true, false",
    "128x256x64_c1x1x1_co": "128, 256, 1, 1, 1, false, false",
    "128x256x64_c2x1x1_co": "128, 256, 2, 1, 1, false, false",
    "192x192x64_c1x1x1_co": "192, 192, 1, 1, 1, false, false",
    "64x64x64_c1x1x2_pp": "64, 64, 1, 1, 2, true, false",
}
SQUARES, CLUSTER = "128x128x64_c1x1x1_pp", "128x256x64_c2x1x1_co"
# Of one square to seven; rows that TMA cannot store; K of several stages; batches.
CASES = {
    "one square": Case(72),
    "two": Case(200),
    "three, unaligned": Case(261, out="f32"),
    "many": Case(776, 8),
    "even": Case(1000, 16, transposed=True),
    "unaligned": Case(515),
    "deep": Case(384, 392),
    "batch": Case(272, batch=3),
    "tf32": Case(392, dtype="f32", out="f32"),
    "integers": Case(400, 128, dtype="s8", out="s32"),
}


def kernel(config, case=CASES["two"], epilogue="Bare"):
    instruction = {"f32": "tf32", "s8": "s8,s8"}.get(case.dtype, case.dtype)
    return carried(wgmma(CONFIGS[config], SYMMETRIC.format(epilogue), instruction, case.layout))


def check(machine, config, case, **how):
    symmetric_cases.check(machine, "wgmma", config, case, **how)


# Each config is compiled for one layout and dtype, and squares of one tile for all.
SAME = [name for name, case in CASES.items() if case.dtype == "bf16" and not case.transposed]
PAIRS = [(config, name) for config in CONFIGS for name in (CASES if config == SQUARES else SAME)]


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    chosen = [(p["config"], CASES[p["name"]]) for p in cases_of(test_products)]
    kernels = dict.fromkeys(kernel(*each) for each in [*chosen, (SQUARES,), (CLUSTER,)])
    return Emulator(run_folder / "symmetric", *kernels, families=("wgmma",))


@pytest.mark.parametrize(("config", "name"), PAIRS)
def test_products(machine, config, name):
    for seed in range(2):
        check(machine, config, CASES[name], seed=seed)


@pytest.mark.parametrize("config", [SQUARES, CLUSTER])
def test_splits(machine, config):
    """Partial sums are symmetric; another kernel adds them up."""
    for case in (Case(200, 392), Case(344, 392, out="f32")):
        check(machine, f"{config}_split3", case)


@pytest.mark.parametrize("k", [392, 391])
def test_one_array(machine, k):
    """The last tiles may overlap those before them; rows that are not aligned are copied once."""
    check(machine, SQUARES, Case(344, k), same={"b": "a"})


def test_computes_half():
    """The work that is counted, and so what a roofline says."""
    problem = Case(4096, 4096).problem
    whole = dataclasses.replace(problem, symmetric=False)
    assert problem.flops == whole.flops * 4097 // 8192
    assert "symmetric" in str(problem)


def polynomial(acc, x):
    """A term of a Newton-Schulz iteration."""
    return (0.5 * acc - 2 * x.astype(acc.dtype)).astype(jnp.bfloat16)


def test_functions_of_symmetric_operands(run_folder):
    n, k = 328, 72
    operand = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    problem, used = function_of_product(polynomial, [operand], (n, n, k), "bfloat16", "float32")
    problem = dataclasses.replace(problem, symmetric=True)
    assert used == (0,)
    function = f"Function<tcgemm::elementwise::{problem.function.name}>"
    kernels = []
    for config in (SQUARES, CLUSTER):
        one = wgmma(CONFIGS[config], SYMMETRIC.format(function), "bf16", "00")
        kernels.append(carried(dataclasses.replace(one, definitions=problem.function.definitions)))
    machine = Emulator(run_folder / "symmetric_functions", *kernels, families=("wgmma",))
    rng = np.random.default_rng(0)
    x, c = integers(rng, (n, k)), integers(rng, (n, n))
    c = (np.tril(c.astype(np.float32)) + np.tril(c.astype(np.float32), -1).T).astype(c.dtype)
    wide, own = x.astype(np.float64), c.astype(np.float64)
    for config in (SQUARES, CLUSTER):
        arrays = {"a": x, "b": x, "function operand 0": c}
        got = machine.run(problem, arrays, implementation="wgmma", config=config)
        expected = 0.5 * (wide @ wide.T) - 2 * own
        np.testing.assert_array_equal(got[0][0].astype(np.float64), expected.astype(DTYPES["bf16"]))


def test_functions_with_a_diagonal(run_folder):
    """The first polynomial of `newton_schulz`, whose term of the identity reads indices."""
    n, k = 328, 328
    scalar, index = jax.ShapeDtypeStruct((), jnp.float32), np.arange(n, dtype=np.int32)
    r = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    rows, columns = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((n, 1), (n,)))
    operands = [r, scalar, scalar, scalar, rows, columns]
    problem, used = function_of_product(_quadratic, operands, (n, n, k), "bfloat16", "float32")
    problem = dataclasses.replace(problem, symmetric=True)
    function = f"Function<tcgemm::elementwise::{problem.function.name}>"
    one = wgmma(CONFIGS[SQUARES], SYMMETRIC.format(function), "bf16", "00")
    one = carried(dataclasses.replace(one, definitions=problem.function.definitions))
    machine = Emulator(run_folder / "symmetric_diagonal", one, families=("wgmma",))
    c = np.tril(integers(np.random.default_rng(0), (n, n)).astype(np.float32))
    c = (c + np.tril(c, -1).T).astype(DTYPES["bf16"])
    values = [c, *np.float32([64, -2, 0.5]), index[:, None], index]
    arrays = {"a": c, "b": c}
    for number, i in enumerate(used):
        arrays[f"function operand {number}"] = np.asarray(values[i])
    got = machine.run(problem, arrays, implementation="wgmma", config=SQUARES)
    own = c.astype(np.float64)
    expected = 64 * np.eye(n) - 2 * own + 0.5 * own @ own
    np.testing.assert_array_equal(got[0][0].astype(np.float64), expected.astype(DTYPES["bf16"]))


TRIANGLE = "tile/triangle.cuh"
MISTAKES = [
    Mistake(TRIANGLE, "rows_of_an_even_side", "side % 2", "0", Case(344)),
    Mistake(TRIANGLE, "rows_of_the_triangle", "first - 1", "row", Case(344)),
    Mistake(TRIANGLE, "diagonal_mirrored_alone", "!=", "==", Case(344)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match="wrong|not equal"):
        check(mistaken, SQUARES, mistake.case)


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    return mutants(
        run_folder / "symmetric_mistaken",
        MISTAKES,
        [mistake.case for mistake in MISTAKES],
        kernels_of=lambda case: [kernel(SQUARES, case)],
        check=lambda made, case: check(made, SQUARES, case),
        families=("wgmma",),
        like=machine,
    )
