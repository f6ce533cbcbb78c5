"""Kernels of packed weights run by the emulator, for the tests of them."""

from emulated import Emulator, carried
from packed_cases import instances, weight_instances


def machine_of(folder, cases, weights=()) -> Emulator:
    """With the kernels of products by their configs, and those that write weights of `weights`."""
    found = {x: None for config, case in cases for x in instances(config, case)}
    found |= {x: None for case in weights for x in weight_instances(case)}
    return Emulator(folder, *map(carried, found), families=("packed",))


def check(machine, config, case, **how):
    """One product."""
    (got,) = machine.run(case.problem, case.arrays, implementation="packed", config=config, **how)
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)
