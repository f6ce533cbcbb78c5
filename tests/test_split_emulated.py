"""The splitting kernels run by the emulator of tests/emulator, and what it must find."""

import emulated
import pytest
from emulated import Emulator, carried
from mistakes import Mistake
from mutants import mutants
from split_cases import X3, X6, X9, Case, instances

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

REAL = Case("real", 3, 37, 1, 131, deeper=3)
ALIGNED = Case("real", 2, 20, 1, 136, X3, wider=1)
LEFT = Case("left", 5, 6, 1, 77, X6, deeper=2)
RIGHT = Case("right", 2, 9, 5, 21, X9, deeper=7)
RIGHT_FIRST = Case("right_first", 3, 4, 7, 30, X3, deeper=1)
CASES = [
    REAL,
    ALIGNED,
    LEFT,
    RIGHT,
    RIGHT_FIRST,
    Case("real", 1, 1, 1, 1, X9),
    Case("real", 1, 300, 1, 12, X3, "f32"),
    Case("real", 40, 1, 1, 50, X3, "f32"),
    Case("left", 3, 2, 1, 16, X3, "f32"),
    Case("right", 1, 3, 2, 26, X3, "f32"),
    Case("real", 9, 5, 1, 8, (0, 0, 0)),
]


@pytest.fixture(scope="module")
def machine(run_folder):
    found = {x: None for case in CASES for x in instances(case)}
    return Emulator(run_folder / "split", *map(carried, found), families=("split",), sanitize=True)


def check(machine, case, **how):
    got = machine.run(case.problem, case.arrays, implementation="split", config="default", **how)
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda x: x.label)
def test_terms(machine, case):
    check(machine, case)


KERNEL = "kernels/split/kernel.cuh"

MISTAKES = [
    Mistake(KERNEL, "half_is_rounded_up", "bits >> kDropped & 1", "1u", REAL),
    Mistake(KERNEL, "rounded_down", "((1u << (kDropped - 1)) - 1)", "0u", REAL),
    Mistake(
        KERNEL, "largest_becomes_infinite", "fminf(fmaxf(rest, -largest), largest)", "rest", REAL
    ),
    Mistake(KERNEL, "infinity_is_taken_by_all", "is_finite ? x[i] : 0.0f", "x[i]", REAL),
    Mistake(KERNEL, "infinity_is_lost", "is_last ? first : words[term]", "words[term]", REAL),
    Mistake(KERNEL, "nan_becomes_infinite", "bits | 0x00400000u", "bits", REAL),
    Mistake(KERNEL, "rest_is_kept", case=REAL),
    Mistake(KERNEL, "neighbors_exchanged", "i % 2 == 0", "i % 2 != 0", REAL),
    Mistake(
        KERNEL,
        "number_of_the_next_row",
        "params.columns",
        "params.columns + 1",
        REAL,
        "wrong|outside",
    ),
    Mistake(
        KERNEL, "depth_is_not_filled", "middle < params.x_middle", "true", REAL, "wrong|outside"
    ),
    Mistake(
        KERNEL,
        "depth_of_the_last_form",
        "inner < params.x_inner",
        "true",
        RIGHT_FIRST,
        "wrong|outside",
    ),
    Mistake(KERNEL, "half_a_vector_twice", "from + i", "from", ALIGNED),
    Mistake(KERNEL, "imaginary_part_twice", "x[2 * i]", "x[2 * i + 1]", LEFT),
    Mistake(
        KERNEL, "sign_of_the_right_one", "negated ? from[i] ^ kSigns : from[i]", "from[i]", RIGHT
    ),
    Mistake(KERNEL, "sign_of_the_left_one", "kOperand == Operand::kRight", "true", LEFT),
    Mistake(KERNEL, "component_of_another_row", "params.d_component", "params.d_inner", RIGHT),
    Mistake(
        KERNEL,
        "extent_of_the_middle",
        "params.num_middle",
        "params.x_middle",
        REAL,
        "wrong|outside",
    ),
]


@pytest.fixture(scope="module")
def mistaken(machine, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    cases = [params["mistake"].case for params in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda case: map(carried, instances(case)), "check": check}
    how |= {"families": ("split",), "sanitize": True, "like": machine}
    return mutants(run_folder / "split_mistaken", MISTAKES, cases, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((RuntimeError, AssertionError), match=mistake.finds):
        check(mistaken, mistake.case)
