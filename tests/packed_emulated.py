"""Kernels of packed weights run by the emulator, for the tests of them."""

from emulated import Emulator, carried
from mutants import mutants
from packed_cases import dequantizes, instances, weight_instances


def machine_of(folder, cases, weights=()) -> Emulator:
    """With the kernels of products by their configs, and those that write weights of `weights`."""
    found = {x: None for config, case in cases for x in instances(config, case)}
    found |= {x: None for case in weights for x in weight_instances(case)}
    return Emulator(folder, *map(carried, found), families=("packed",))


def check(machine, config, case, **how):
    """One product."""
    (got,) = machine.run(case.problem, case.arrays, implementation="packed", config=config, **how)
    if wrong := case.mismatch(got, dequantizes=dequantizes(config)):
        raise AssertionError(wrong)


def mistaken_of(machine, folder, mistakes, products) -> Emulator:
    """Kernels of products that make one of the mistakes, as `mutant` says, counted from 1."""
    return mutants(
        *(folder, mistakes, products),
        kernels_of=lambda product: map(carried, instances(*product)),
        check=lambda made, product: check(made, *product),
        families=("packed",),
        like=machine,
    )
