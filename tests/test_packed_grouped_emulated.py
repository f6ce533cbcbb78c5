"""The kernel of packed weights over experts, run by the emulator, and what it must find."""

import re

import emulated
import numpy as np
import pytest
from emulated import Emulator, carried
from mistakes import Mistake
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
def machine(run_folder, cases_of):
    products = [(params["config"], params["case"]) for params in cases_of(test_products)]
    return machine_of(run_folder / "packed_grouped", [CASES[0], *products], [FEW])


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
ONE = "128x2_c1", FEW
# Where what is found is wrong, nothing is divided by 0: that ends the process here, and on no GPU.
GUARD = Mistake(WORK, "division_by_0", "/ blocks", "/ max(blocks, 1u)")

MISTAKES = [
    Mistake(WORK, "weight_of_the_first", "max(run.expert, 0)", "0", ONE),
    Mistake(WORK, "weight_of_another", "offset", "offset / 2", ("128x2_c1", HERE)),
    Mistake(WORK, "rows_of_no_expert", "kNoExpert", "0", CASES[1]),
    Mistake(WORK, "rows_after_the_last", "kNoExpert", "0", ONE),
    Mistake(WORK, "rows_without_the_last", "run.row_end", "run.row_end - 1", ONE),
    Mistake(KERNEL, "x_of_the_first", "work_.row + ", "", ONE),
    Mistake(KERNEL, "columns_of_the_next", "params_.tiles", "1", ONE),
    Mistake(WORK, "one_block_of_rows", "(rows + kRows - 1) / kRows", "rows > 0 ? 1 : 0", ONE),
    Mistake(WORK, "shares_of_warps_not_awaited", case=("128x2_c1", MANY), finds="wrong|deadlock"),
    Mistake(WORK, "what_is_found_not_awaited", case=ONE),
    Mistake(WORK, "experts_of_the_first_threads", "experts.num_sizes", "1", ("128x2_c1", MANY)),
    Mistake(WORK, "sizes_beyond_all_but_a_row", "num_rows,", "num_rows - 1,", ("128x2_c4", TABLE)),
    Mistake(WORK, "sizes_below_zero", "max(size, 0)", "size", ("64x4_c1", COLUMNS)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(machine, run_folder, mistake):
    """Some show in every order of events, others take a few."""
    mistaken = Emulator(
        run_folder / f"packed_grouped_{mistake}",
        *map(carried, instances(*mistake.case)),
        families=("packed",),
        mistakes=[mistake, GUARD],
        like=machine,
    )
    found = ""
    for seed in range(12):
        try:
            check(mistaken, *mistake.case, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(mistake.finds, found), found
