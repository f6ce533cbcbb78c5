"""The kernel of packed weights run by the emulator of tests/emulator, and what it must find."""

import re

import emulated
import numpy as np
import pytest
from emulated import Emulator, carried
from mistakes import Mistake
from packed_cases import Case, instances
from packed_emulated import check, machine_of

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
    ("256x2_c1", Case(37, 272, 768, 128, "int8", x="f16", out="f16")),
    ("128x2_c1", Case(2, 80, 520, None, "int4", zeros=True, out="bf16")),
    ("128x2_c4", Case(7, 128, 1160, None, "uint8", scale="f16")),
    ("64x4_c1", Case(30, 96, 1024, 64, "nf4", scale="f32")),
    ("64x4_c2", Case(13, 144, 1544, None, "int4")),
    ("128x2_c1", Case(1, 64, 256, 32, "nf4", x="f16")),
    # MXFP4, NVFP4 and other groups of 16 rows.
    ("128x2_c2", Case(12, 144, 1088, 32, "float4_e2m1fn", scale="f8e8m0fnu")),
    ("128x2_c1", Case(5, 80, 544, 32, "float4_e2m1fn", scale="f8e8m0fnu", x="f16")),
    ("128x2_c4", Case(3, 144, 528, 16, "int4", zeros=True, x="f16")),
    ("64x4_c1", Case(20, 112, 256, 16, "int8", scale="f32")),
    ("128x2_c1", Case(3, 48, 256, None, "int4", scale="f8e4m3fn", columns=True)),
    # MXFP8, and float8 weights with other scales.
    ("128x2_c2", Case(12, 144, 1088, 32, "float8_e4m3fn", scale="f8e8m0fnu", x="f16")),
    ("128x2_c1", Case(5, 80, 544, 32, "float8_e5m2", scale="f8e8m0fnu")),
    ("64x4_c1", Case(20, 112, 264, None, "float8_e5m2", scale="f32", x="f16")),
    # Those of the mistakes below.
    ("64x4_c1", Case(3, 112, 544, 32, "float4_e2m1fn", scale="f8e8m0fnu")),
    ("128x2_c1", Case(3, 48, 512, 128, "float8_e4m3fn")),
    ("128x2_c2", Case(9, 176, 1040, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True)),
    ("128x2_c2", Case(11, 200, 1600, 64, "int4", zeros=True)),
    ("128x2_c1", Case(2, 40, 512, 64, "nf4")),
    ("128x2_c1", Case(2, 40, 512, 64, "uint8", zeros=True)),
]


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    products = [(params["config"], params["case"]) for params in cases_of(test_products)]
    weights = [params["case"] for params in cases_of(test_weights)]
    return machine_of(run_folder / "packed", products, weights)


@pytest.mark.parametrize(("config", "case"), CASES, ids=lambda x: getattr(x, "label", x))
def test_products(machine, config, case):
    for seed in range(3):
        check(machine, config, case, seed=seed)


CONFIGS = implementations.configs_of("packed", "packed")
ALL_CASES = [
    Case(5, 280, 2080, 32, "int4", x="f16"),
    Case(16, 264, 1536, 128, "uint4", zeros=True, scale="f32"),
    Case(29, 136, 1088, 64, "int8", scale="f16"),
    Case(9, 520, 4096, 128, "uint8", zeros=True, x="f16"),
    Case(12, 72, 2304, None, "int8"),
    Case(33, 400, 640, 64, "nf4"),
    Case(150, 280, 1664, 128, "uint4", zeros=True, x="f16"),
]


@pytest.mark.emulated_all
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda x: x.label)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config(machine, run_folder, config, case):
    (candidate,) = implementations.considered("packed", (config,), case.problem, ASSUMED_GPU)
    if candidate.reason:
        pytest.skip(candidate.reason)
    folder = run_folder / f"packed_{config}_{case.label}"
    own = map(carried, instances(config, case))
    emulator = Emulator(folder, *own, families=("packed",), like=machine)
    for seed in range(4):
        check(emulator, config, case, seed=seed)


@pytest.mark.parametrize("case", dict.fromkeys(case for _, case in CASES), ids=lambda x: x.label)
def test_weights(machine, case):
    """As arrays they have the bits of what XLA makes of them."""
    how = {"implementation": "packed", "config": "128x2_c1"}
    (got,) = machine.run(case.weight_problem, case.weight_arrays, **how)
    np.testing.assert_array_equal(got[: case.n], case.exact_rows)


KERNEL, FRAGMENTS = "kernels/packed/kernel.cuh", "kernels/packed/fragments.cuh"
SUMS = "kernels/packed/sums.cuh"
POWERS, FP8, FP4, SPLIT, TABLE, BYTES = CASES[-6:]

MISTAKES = [
    Mistake(KERNEL, "stages_not_awaited", "kStages - 2", "kStages - 1", SPLIT),
    Mistake(KERNEL, "stages_overwritten", case=SPLIT),
    Mistake(KERNEL, "stages_overwritten_by_accumulators", case=SPLIT),
    Mistake(KERNEL, "accumulators_not_awaited", case=TABLE),
    Mistake(SUMS, "sums_of_one_warp", "kSums.warps_k", "1", SPLIT),
    Mistake(KERNEL, "blocks_not_begun", case=SPLIT, finds="which the block has not got"),
    Mistake(KERNEL, "shares_not_awaited", case=SPLIT, finds="ended|wrong"),
    Mistake(
        KERNEL, "too_few_bytes", "share_bytes()", "share_bytes() / 2", SPLIT, "block that has ended"
    ),
    Mistake(KERNEL, "x_beyond_k", " && k + i * kStep < params_.k", "", SPLIT),
    Mistake(KERNEL, "scale_of_the_next_group", "* 16 +", "* 16 + 16 +", SPLIT),
    Mistake(KERNEL, "zeros_of_the_other_column", "kZerosOffset", "kZerosOffset + 4", SPLIT),
    Mistake(FRAGMENTS, "nibbles_swapped", "4 * p", "4 * (p ^ 1)", SPLIT),
    Mistake(FRAGMENTS, "zero_off_by_one", "0x4300u", "0x4301u", SPLIT),
    Mistake(FRAGMENTS, "sign_of_eight_bits", "lop3_not_and_or", "lop3_and_or", BYTES),
    Mistake(FRAGMENTS, "zero_of_eight_bits", "!kZeroIs128", "kZeroIs128", BYTES),
    Mistake(FRAGMENTS, "byte_of_the_table", "9", "17", TABLE),
    Mistake(KERNEL, "first_group_of_a_block", "lane_ % 4 / 2", "0", FP4),
    Mistake(FRAGMENTS, "scales_of_fragments_exchanged", "p % 2", "1 - p % 2", POWERS),
    Mistake(FRAGMENTS, "factors_of_fragments_exchanged", "p % 2", "1 - p % 2", FP4),
    Mistake(FRAGMENTS, "exponent_of_a_power", "kExponent", "kExponent - 1", POWERS),
    Mistake(FRAGMENTS, "largest_power", "& four", "& ~four", POWERS),
    Mistake(KERNEL, "headroom_not_removed", case=FP4),
    Mistake(FRAGMENTS, "magnitudes_of_float4", "6", "5", FP4),
    Mistake(FRAGMENTS, "split_pairs_of_float4", "14 : 7", "7 : 14", FP4),
    Mistake(FRAGMENTS, "mantissa_of_float8", "10 : 7", "10 : 6", FP8),
    Mistake(FRAGMENTS, "signs_of_float8", "word << 8", "word", FP8),
    Mistake(FRAGMENTS, "column_scales_exchanged", "i % 4 < 2", "i % 4 >= 2", FP4),
    Mistake(
        KERNEL,
        "column_scales_of_the_next_tile",
        "weight_tile(tile_of(t))",
        "weight_tile(tile_of(t ^ 1))",
        FP4,
    ),
    Mistake(FRAGMENTS, "halves_of_the_table", "entry % 16", "entry / 16", TABLE),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(machine, run_folder, mistake):
    """Some show in every order of events, others take a few."""
    mistaken = Emulator(
        run_folder / f"packed_{mistake}",
        *map(carried, instances(*mistake.case)),
        families=("packed",),
        mistakes=[mistake],
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
