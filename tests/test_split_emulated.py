"""The splitting kernels run by the emulator of tests/emulator, and what it must find."""

import emulated
import pytest
from emulated import Emulator, as_mutants, carried
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
def test_parts(machine, case):
    check(machine, case)


KERNEL = "kernels/split/kernel.cuh"
WRONG = "parts are wrong"
SIGN = "of_im.store(pair + params.d_part, kTaken[i], is_last, kOperand == Operand::kRight);"

# What the kernel holds, what to put in its place, the case that shows it, and what is then found.
MISTAKES = {
    "half_is_rounded_up": ("bits >> kDropped & 1", "1u", REAL, WRONG),
    "rounded_down": ("((1u << (kDropped - 1)) - 1)", "0u", REAL, WRONG),
    "largest_becomes_infinite": ("fminf(fmaxf(rest, -largest), largest)", "rest", REAL, WRONG),
    "infinity_is_taken_by_all": ("is_finite ? x[i] : 0.0f", "x[i]", REAL, WRONG),
    "infinity_is_lost": ("is_last ? first : words[part]", "words[part]", REAL, WRONG),
    "nan_becomes_infinite": ("bits | 0x00400000u", "bits", REAL, WRONG),
    "rest_is_kept": ("rest -= own;", "", REAL, WRONG),
    "neighbours_exchanged": ("i % 2 == 0", "i % 2 != 0", REAL, WRONG),
    "number_of_the_next_row": (
        *("(params.columns - column) * kComponents", "(params.columns + 1 - column) * kComponents"),
        *(REAL, "wrong|outside"),
    ),
    "depth_is_not_filled": ("middle < params.x_middle", "true", REAL, "wrong|outside"),
    "depth_of_the_last_form": ("inner < params.x_inner", "true", RIGHT_FIRST, "wrong|outside"),
    "half_a_vector_twice": ("from + i", "from", ALIGNED, WRONG),
    "components_exchanged": (
        "re[i] = x[2 * i], im[i] = x[2 * i + 1];",
        "im[i] = x[2 * i], re[i] = x[2 * i + 1];",
        *(LEFT, WRONG),
    ),
    "sign_of_the_right_one": ("negated ? from[i] ^ kSigns : from[i]", "from[i]", RIGHT, WRONG),
    "sign_of_the_left_one": (
        *(SIGN, "of_im.store(pair + params.d_part, kTaken[i], is_last, true);", LEFT, WRONG),
    ),
    "component_of_another_row": (
        "of_im.store(pair + params.d_component, kTaken[i], is_last);",
        "of_im.store(pair + params.d_inner, kTaken[i], is_last);",
        *(RIGHT, WRONG),
    ),
    "extent_of_the_middle": (
        "outer * params.num_middle",
        "outer * params.x_middle",
        REAL,
        "wrong|outside",
    ),
}


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    changes = as_mutants((KERNEL, *mistake[:2]) for mistake in MISTAKES.values())
    found = {x: None for *_, case, _ in MISTAKES.values() for x in instances(case)}
    folder = run_folder / "split_mistaken"
    how = {"families": ("split",), "changes": changes, "sanitize": True}
    return Emulator(folder, *map(carried, found), like=machine, **how)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(mistaken, name):
    mistaken.mutant = list(MISTAKES).index(name) + 1
    *_, case, says = MISTAKES[name]
    with pytest.raises((RuntimeError, AssertionError), match=says):
        check(mistaken, case)


def test_without_a_mistake(mistaken):
    mistaken.mutant = 0
    for *_, case, _ in MISTAKES.values():
        check(mistaken, case)
