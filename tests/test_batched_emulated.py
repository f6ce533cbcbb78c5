"""The kernels for batches of tiny matrices run by the emulator of tests/emulator."""

import dataclasses

import emulated
import pytest
from batched_cases import Case, instances
from emulated import Emulator, carried
from mistakes import Mistake, as_mutants

from jax_tcgemm.kernels import compile_kernels, nvrtc

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

LAYOUTS = ("NN", "NT", "TN", "TT")
# Sides that threads do not divide, and several groups for each block of one SM.
UNEVEN = Case(1003, 11, 11, 11, "NT")
EVEN = Case(150, 16, 16, 16, "NN")
HALF = Case(999, 5, 3, 7, "TN", "f16")
COMPLEX = Case(61, 9, 8, 6, "TT", "c64")
PADDED = Case(77, 8, 8, 8, "NT")
PADDED_ROWS = Case(9, 32, 32, 32, "NT")
LARGE = Case(5, 31, 29, 27, "NN")
CASES = [
    UNEVEN,
    EVEN,
    HALF,
    COMPLEX,
    PADDED,
    PADDED_ROWS,
    *(Case(203, 15, 9, 13, layout) for layout in LAYOUTS),
    *(Case(5, 31, 29, 27, layout) for layout in LAYOUTS),
    *(Case(7, 32, 32, 32, layout, "f16") for layout in LAYOUTS),
    *(Case(33, 12, 4, 20, layout, "bf16") for layout in LAYOUTS),
    *(Case(41, 7, 10, 6, layout, "f64") for layout in LAYOUTS),
    *(Case(19, 4, 6, 8, layout, "c64") for layout in LAYOUTS),
    *(Case(3, 13, 16, 5, layout, "c128") for layout in LAYOUTS),
    Case(4099, 2, 2, 2),
    Case(4099, 2, 3, 2, "TT", "bf16"),
    Case(1, 3, 3, 3, "TN", "f16"),
    Case(3, 31, 31, 31, "NT", "bf16"),
    Case(5, 32, 32, 32, "NT", "c128"),
    Case(3, 32, 2, 32, "TN"),
    Case(300, 2, 32, 3, "NN", "f64"),
    Case(31, 8, 12, 16, "NT", "f16", "f32"),
    Case(31, 8, 12, 16, "NN", "f32", "bf16"),
    Case(21, 17, 6, 3, "TN", "bf16", "f16"),
]


@pytest.fixture(scope="session")
def machine(run_folder, cases_of):
    """The kernels of the cases that run."""
    cases = [UNEVEN, HALF, *(params["case"] for params in cases_of(test_products))]
    kernels = map(carried, instances(cases))
    return Emulator(run_folder / "batched", *kernels, families=("batched",), sanitize=True)


def check(machine, case, **how):
    got = machine.run(
        case.problem, case.arrays, implementation="simt_batched", config="default", **how
    )
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda x: x.label)
def test_products(machine, case):
    check(machine, case)


@pytest.mark.parametrize("num_sms", [1, 132])
@pytest.mark.parametrize("case", [UNEVEN, HALF], ids=lambda x: x.label)
def test_any_number_of_blocks(machine, case, num_sms):
    check(machine, case, num_sms=num_sms, seed=1)


def test_two_levels_of_a_batch(machine):
    levels = {"outer_stride": 59 * 121, "inner_stride": 121}
    a, b = (dataclasses.replace(x, **levels) for x in (UNEVEN.problem.a, UNEVEN.problem.b))
    problem = dataclasses.replace(UNEVEN.problem, batch_inner=59, a=a, b=b)
    how = {"implementation": "simt_batched", "config": "default"}
    assert UNEVEN.mismatch(machine.run(problem, UNEVEN.arrays, **how)) == ""


def changed(operand, **changes):
    """The product of UNEVEN with something else of one operand."""
    x = dataclasses.replace(getattr(UNEVEN.problem, operand), **changes)
    return dataclasses.replace(UNEVEN.problem, **{operand: x})


REFUSED = {
    "rows": (Case(3, 1, 4, 4).problem, "m, n and k must be from 2 to 32, got 1, 4 and 4"),
    "columns": (Case(3, 4, 33, 4).problem, "m, n and k must be from 2 to 32, got 4, 33 and 4"),
    "k": (dataclasses.replace(UNEVEN.problem, k=0), "m, n and k must be from 2 to 32"),
    "rows_apart": (changed("a", ld=12), "the matrices of a must be packed"),
    "matrices_apart": (changed("a", inner_stride=122), "the matrices of a must be packed"),
    "one_matrix": (changed("b", inner_stride=0), "the matrices of b must be packed"),
    "alpha": (dataclasses.replace(UNEVEN.problem, alpha=2.0), "it has no alpha other than 1"),
    "types": (changed("b", dtype="f16"), "b must be f32 where a is f32, got f16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(machine, name):
    problem, rule = REFUSED[name]
    how = {"implementation": "simt_batched", "config": "default"}
    with pytest.raises(RuntimeError, match=f"rejected: {rule}"):
        machine.run(problem, UNEVEN.arrays, **how)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_machine_code_without_spills(target):
    made = compile_kernels(instances(CASES[target == "sm_80" :: 2], target))
    assert {instance.kernel: x.faults for instance, x in made.items() if x.faults} == {}


KERNEL = "kernels/batched/kernel.cuh"

MISTAKES = [
    Mistake(KERNEL, "group_is_not_waited_for", case=LARGE),
    Mistake(KERNEL, "result_is_read_early", case=UNEVEN),
    Mistake(KERNEL, "stage_of_the_group_before", "(stage + 1) % kStages", "stage", UNEVEN),
    Mistake(
        KERNEL, "last_vector_is_anothers", "kSide.vectors() - 1", "kSide.vectors() - 2", UNEVEN
    ),
    Mistake(
        KERNEL,
        "rows_of_the_next_matrix",
        "m_vector >= kMSide.vectors()",
        "false",
        UNEVEN,
        "wrong|past",
    ),
    Mistake(
        KERNEL,
        "columns_of_the_next_row",
        "n_vector >= kNSide.vectors()",
        "false",
        UNEVEN,
        "wrong|past",
    ),
    Mistake(KERNEL, "last_bytes_are_not_stored", "at >= num_bytes - whole_bytes", "true", HALF),
    Mistake(
        KERNEL,
        "last_bytes_are_a_chunk",
        "num_bytes / kChunk * kChunk",
        "ceil_div(num_bytes, kChunk) * kChunk",
        HALF,
        "outside",
    ),
    Mistake(
        KERNEL,
        "padding_of_matrices_is_forgotten",
        "chunk + chunk / (kStored.matrix_bytes() / kChunk)",
        "chunk",
        PADDED,
    ),
    Mistake(
        KERNEL,
        "padding_of_rows_is_forgotten",
        "chunk + chunk / (kStored.columns * kStored.bytes / kChunk)",
        "chunk",
        PADDED_ROWS,
    ),
    Mistake("tile/multiply_add.cuh", "sign_of_the_imaginary_parts", "-x.im", "x.im", COMPLEX),
    Mistake(KERNEL, "one_matrix_more_is_stored", "count", "count + 1", UNEVEN, "wrong|outside"),
]


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    kernels = map(carried, instances([mistake.case for mistake in MISTAKES]))
    how = {"families": ("batched",), "mistakes": as_mutants(MISTAKES), "sanitize": True}
    return Emulator(run_folder / "batched_mistaken", *kernels, like=machine, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((RuntimeError, AssertionError), match=mistake.finds):
        check(mistaken, mistake.case, num_sms=1)


def test_without_a_mistake(mistaken):
    mistaken.mutant = 0
    for mistake in MISTAKES:
        check(mistaken, mistake.case, num_sms=1)
