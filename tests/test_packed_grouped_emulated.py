"""The kernel of packed weights over experts, run by the emulator, and what it must find."""

import re

import emulated
import numpy as np
import pytest
from emulated import Emulator, carried
from packed_cases import Case, instances
from packed_emulated import check, machine_of

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

# Experts without tokens, one with most, rows after the last, and what fills no tile.
UNEVEN = (3, 0, 17, 1, 0, 0, 8, 0)
FEW = Case(40, 144, 640, 64, "int4", zeros=True, sizes=UNEVEN)
HERE = Case(29, 72, 512, 128, "uint8", scale="f16", sizes=UNEVEN, offset=2, experts=3)
COLUMNS = Case(30, 40, 264, None, "int8", x="f16", out="f16", sizes=(9, -4, 0, 5))
SPLIT = Case(21, 160, 1600, 32, "int4", out="bf16", sizes=(0, 20, 0))
TABLE = Case(70, 64, 256, 64, "nf4", scale="f32", sizes=(50, 0, 90))
# More experts than threads.
MANY = Case(60, 40, 128, 128, "int4", sizes=tuple(int(i % 13 == 0) for i in range(600)))
CASES = [
    ("128x2_c1", FEW),
    ("128x2_c1", HERE),
    ("64x4_c1", COLUMNS),
    ("128x2_c2", SPLIT),
    ("128x2_c4", TABLE),
    ("128x2_c1", MANY),
    ("128x2_c4", Case(9, 200, 1152, 64, "uint4", zeros=True, x="f16", sizes=(9,))),
]


@pytest.fixture(scope="module")
def machine(run_folder):
    return machine_of(run_folder / "packed_grouped", CASES, [FEW])


@pytest.mark.parametrize(("config", "case"), CASES, ids=lambda x: getattr(x, "label", x))
def test_products(machine, config, case):
    for seed in range(2):
        check(machine, config, case, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_any_sizes(machine, seed):
    """Of the tokens of all experts, and of fewer and more than there are rows."""
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(rng.integers(0, 60), rng.dirichlet(np.full(8, 0.5)))
    first = int(rng.integers(0, 3))
    own = {"sizes": tuple(map(int, sizes)), "offset": first, "experts": 8 - first}
    check(machine, "128x2_c1", Case(40, 144, 640, 64, "int4", zeros=True, **own), seed=seed)


def test_weights(machine):
    """Those of all experts are one array; its bits are those of what XLA makes of them."""
    how = {"implementation": "packed", "config": "128x2_c1"}
    (got,) = machine.run(FEW.weight_problem, FEW.weight_arrays, **how)
    got = got.reshape(len(UNEVEN), -1, FEW.k)[:, : FEW.n]
    np.testing.assert_array_equal(got, FEW.exact_rows)


KERNEL, WORK = "kernels/packed/kernel.cuh", "kernels/packed/work.cuh"
WRONG = " are wrong"
ONE = "128x2_c1", FEW
# Where what is found is wrong, nothing is divided by 0: that ends the process here, and on no GPU.
GUARD = (
    "blocks = row_blocks(run.row_end - run.row)",
    "blocks = max(row_blocks(run.row_end - run.row), 1u)",
)

# File, what it holds, what to put in its place, the product that shows it, and what is then found.
MISTAKES = {
    "weight_of_the_first": (WORK, "max(run.expert, 0) * params.tiles", "0", ONE, WRONG),
    "weight_of_another": (
        *(WORK, "const int32_t own = number - offset;", "const int32_t own = number - offset / 2;"),
        *(("128x2_c1", HERE), WRONG),
    ),
    "rows_of_no_expert": (WORK, ": kOfNone, rows.begin", ": 0, rows.begin", CASES[1], WRONG),
    "rows_after_the_last": (
        WORK,
        "run = {kOfNone, rows_before",
        "run = {0, rows_before",
        ONE,
        WRONG,
    ),
    "rows_without_the_last": (
        *(WORK, "work->row_end = run.row_end;", "work->row_end = run.row_end - 1;", ONE, WRONG),
    ),
    "x_of_the_first": (
        *(KERNEL, "const int32_t row = work_.row + thread_", "const int32_t row = thread_"),
        *(ONE, WRONG),
    ),
    "columns_of_the_next": (
        *(KERNEL, "return work_.first_tile + params_.tiles;", "return work_.first_tile + 1;"),
        *(ONE, WRONG),
    ),
    "one_block_of_rows": (*(WORK, "(rows + kRows - 1) / kRows;", "rows > 0 ? 1 : 0;", ONE, WRONG),),
    "shares_of_warps_not_awaited": (
        *(WORK, "shares[warp] = value;\n  __syncthreads();", "shares[warp] = value;"),
        *(("128x2_c1", MANY), WRONG + "|deadlock"),
    ),
    "what_is_found_not_awaited": (
        *(WORK, "    __syncthreads();\n    if (place < blocks_before) break;"),
        *("    if (place < blocks_before) break;", ONE, WRONG),
    ),
    "experts_of_the_first_threads": (
        *(WORK, "first < experts.num_sizes; first += kThreads", "first < 1; first += kThreads"),
        *(("128x2_c1", MANY), WRONG),
    ),
    "sizes_beyond_all_but_a_row": (
        *(WORK, "num_rows, shares[0], &rows_before", "num_rows - 1, shares[0], &rows_before"),
        *(("128x2_c4", TABLE), WRONG),
    ),
    "sizes_below_zero": (
        *(WORK, "static_cast<uint32_t>(max(size, 0))", "static_cast<uint32_t>(size)"),
        *(("64x4_c1", COLUMNS), WRONG),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(machine, run_folder, name):
    """Some show in every order of events, others take a few."""
    file, old, new, product, says = MISTAKES[name]
    mistaken = Emulator(
        run_folder / f"packed_grouped_{name}",
        *map(carried, instances(*product)),
        families=("packed",),
        changes={file: [(old, new)], WORK: [(old, new)] * (file == WORK) + [GUARD]},
        like=machine,
    )
    found = ""
    for seed in range(12):
        try:
            check(mistaken, *product, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(says, found), found
