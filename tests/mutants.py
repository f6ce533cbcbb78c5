"""Kernels that make mistakes at run time, for the tests that these are found."""

from pathlib import Path

from emulated import Emulator
from mistakes import as_mutants

# What is said of wrong values and of wrong barriers.
WRONG = "not equal|wrote outside|deadlock|more often than it expects|block that has ended"


def mutants(folder: Path, mistakes, cases, *, kernels_of, check, **how) -> Emulator:
    """Kernels that make one of the mistakes, as `mutant` says, counted from 1.

    They are those of the cases, as `kernels_of` has them of each, and right without a mistake, by
    `check(emulator, case)`. `how`: as Emulator takes it.
    """
    cases = dict.fromkeys(cases)
    kernels = dict.fromkeys(kernel for case in cases for kernel in kernels_of(case))
    made = Emulator(folder, *kernels, mistakes=as_mutants(mistakes), **how)
    for case in cases:
        check(made, case)
    return made
