"""Products with packed weights and generated functions, run by the emulator: what it must find."""

import re

import emulated
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from mistakes import Mistake
from mutants import mutants
from packed_functions import CASES

from jax_tcgemm.device.fusion import packed
from jax_tcgemm.kernels import nvrtc

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())


def check(machine, name, **how):
    """One call; its arrays are as the implementation sees them."""
    config, call = CASES[name]
    problem, used, product = call.folded
    arrays = dict(call.case.arrays)
    for i, number in enumerate(used):
        x = call.operands[number]
        arrays[f"function operand {i}"] = x.view(np.uint8) if x.dtype == np.bool_ else x
    got = machine.run(problem, arrays, implementation="packed", config=config, **how)
    made = packed.Made(
        *(problem.function, product.function, product.shape),
        *((1, problem.m, problem.d_columns), product.levels),
    )
    call.check(made.results([jnp.asarray(x) for x in got]), config)


def kernels_of(names):
    found = (x for name in names for x in CASES[name][1].kernels(CASES[name][0]))
    return map(carried, dict.fromkeys(found))


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    names = [params["name"] for params in cases_of(test_functions)]
    return Emulator(run_folder / "packed_functions", *kernels_of(names), families=("packed",))


@pytest.mark.parametrize("name", CASES)
def test_functions(machine, name):
    for seed in range(2):
        check(machine, name, seed=seed, last_cluster_first=seed == 1)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize(
    "name",
    [
        *("gated", "wide gated", "wide reductions", "gated experts", "wide gated experts"),
        *("dequantizing", "dequantizing gated", "dequantizing gated experts"),
    ],
)
def test_compiles_without_faults(name):
    config, call = CASES[name]
    assert nvrtc.compile_kernel(call.kernels(config)[0]).faults == ()


KERNEL, WIDE = "kernels/packed/kernel.cuh", "kernels/packed/wide_block.cuh"
SUMS, WORK = "kernels/packed/sums.cuh", "kernels/packed/work.cuh"
MISTAKES = [
    Mistake(SUMS, "up_of_another_share", "rank * kColumns", "0", "gated"),
    Mistake(SUMS, "a_part_twice", "part % kParts", "0", "whole rows"),
    Mistake(SUMS, "sums_of_another_pair", "lane % 4 * 2", "lane % 2 * 2", "everything"),
    Mistake(SUMS, "scales_before_the_function", "rows.scales != nullptr", "false", "float8"),
    Mistake(KERNEL, "gate_for_up", "tile / kTilesPerProduct * params_.tiles", "0", "columns"),
    Mistake(WIDE, "gate_for_up", "tile / kTilesPerProduct * params_.tiles", "0", "wide gated"),
    Mistake(SUMS, "operands_of_the_first_expert", "work.expert", "0", "experts"),
    Mistake(SUMS, "operands_of_the_first_expert", "work.expert", "0", "wide gated experts"),
    Mistake(SUMS, "rows_of_the_next_expert", "work.row_end", "params.m", "wide experts"),
    Mistake(
        SUMS, "function_of_rows_of_no_expert", "work.has_no_expert()", "false", "gated experts"
    ),
    Mistake(SUMS, "zeros_without_the_last_row", "row_end - row", "row_end - row - 1", "experts"),
    Mistake(WORK, "one_half_of_a_weight", "params.weight_tiles", "params.tiles", "gated experts"),
]


@pytest.fixture(scope="module")
def mistaken(machine, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    names = [params["mistake"].case for params in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda name: kernels_of([name]), "check": check}
    how |= {"families": ("packed",), "like": machine}
    return mutants(run_folder / "packed_functions_mistaken", MISTAKES, names, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match="wrong|not equal") as found:
        # Blocks that write rows of the next expert do so after that one's.
        check(mistaken, mistake.case, last_cluster_first=True)
    assert re.search(mistake.finds, str(found.value))
