"""Kernels of packed weights run by the emulator, for the tests of them."""

from emulated import Emulator, carried
from packed_cases import instances


def machine_of(folder, cases) -> Emulator:
    """With the kernels of products by their configs."""
    found = {x: None for config, case in cases for x in instances(config, case)}
    return Emulator(folder, *map(carried, found), families=("packed",))


def check(machine, config, case, **how):
    """One product."""
    (got,) = machine.run(case.problem, case.arrays, implementation="packed", config=config, **how)
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)
