"""The kernel of packed weights run by the emulator of tests/emulator, and what it must find."""

import emulated
import pytest
from emulated import Emulator, carried
from packed_cases import Case

from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.devices import ASSUMED_GPU

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

# A config and the product that it runs.
CASES = [
    # Every format, columns and rows of x that fill no tile, stages that are used several times.
    ("128x2_c1", Case(5, 200, 1536)),
    ("128x2_c1", Case(8, 144, 640, 64, "uint4", zeros=True, scale="f32", x="f16")),
    ("128x2_c2", Case(3, 160, 1568, 32, "int8", scale="f16")),
    ("128x2_c4", Case(16, 128, 1536, 128, "uint8", zeros=True)),
    ("256x2_c1", Case(37, 272, 768, 64, "int8", zeros=True, x="f16", out="f16")),
    ("128x2_c1", Case(2, 80, 520, None, "int4", zeros=True, out="bf16")),
    ("128x2_c4", Case(7, 128, 1160, None, "uint8", scale="f16")),
    ("64x4_c1", Case(30, 96, 1024, 64, "nf4", scale="f32")),
    ("128x2_c1", Case(1, 64, 256, 32, "nf4", x="f16")),
]


def instances(config, case):
    candidate = implementations.Candidate("packed", config, "")
    return implementations.kernels(candidate, case.problem, ASSUMED_GPU)


@pytest.fixture(scope="module")
def machine(run_folder):
    found = {x: None for config, case in CASES for x in instances(config, case)}
    return Emulator(run_folder / "packed", *map(carried, found), families=("packed",))


def check(machine, config, case, **how):
    (got,) = machine.run(case.problem, case.arrays, implementation="packed", config=config, **how)
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)


@pytest.mark.parametrize(("config", "case"), CASES, ids=lambda x: getattr(x, "label", x))
def test_products(machine, config, case):
    for seed in range(3):
        check(machine, config, case, seed=seed)
