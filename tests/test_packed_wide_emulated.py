"""The kernel of packed weights and many rows run by the emulator, and what it must find."""

import re

import emulated
import numpy as np
import pytest
from mistakes import Mistake
from packed_cases import Case
from packed_emulated import check, machine_of, mistaken_of

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

# A config and the product that it runs: formats, rows and columns that fill no tile, K that fills
# no stage, blocks of a cluster without any.
RING = ("w128x64_c1", Case(70, 208, 1152))  # four stages, used several times
SPLIT = ("w128x64_c2", Case(40, 144, 1856, 64, "int4", zeros=True))
TABLE = ("w128x64_c1", Case(9, 40, 512, 64, "nf4", scale="f32"))
COLUMNS = ("w128x128_c1", Case(100, 136, 1032, None, "uint8", zeros=True, x="f16", out="bf16"))
# The last block has no columns, and multiplies x for the other one all the same.
SHARED = ("w128x64_m2", Case(70, 272, 1152, 64, "int8"))
FOUR = ("w128x64_c4", Case(64, 128, 520, None, "int8", out="f16"))
# x of 8-bit floats: parts of groups, and of 128 of a whole column, without which sums of one sign
# lose ten times as much.
FLOAT8 = ("w128x64_c2", Case(70, 144, 1152, 128, "int4", x="f8e4m3fn"))
FLOAT8_ZEROS = ("w128x128_c1", Case(100, 80, 712, None, "int4", zeros=True, x="f8e4m3fn"))
FLOAT8_SHARED = ("w128x64_m2", Case(60, 272, 1088, 32, "uint4", zeros=True, x="f8e4m3fn"))
FLOAT8_PARTS = ("w128x64_c1", Case(16, 32, 2048, None, "uint4", x="f8e4m3fn", positive=True))
CASES = [
    RING,
    SHARED,
    SPLIT,
    TABLE,
    COLUMNS,
    FLOAT8,
    FLOAT8_ZEROS,
    FLOAT8_SHARED,
    FLOAT8_PARTS,
    ("w128x96_c2", Case(50, 96, 1096, None, "int4", x="f8e4m3fn", out="bf16")),
    ("w256x64_c1", Case(20, 272, 264, None, "uint4", zeros=True, x="f8e4m3fn", scale="f32")),
    (
        "w128x64_c1",
        Case(60, 48, 512, 64, "uint4", x="f8e4m3fn", sizes=(3, 0, 40, 1, 8), offset=1, experts=3),
    ),
    ("w128x128_c4", Case(130, 144, 928, 32, "int8", scale="f16")),
    ("w256x64_c2", Case(20, 528, 1544, None, "int4", x="f16")),
    FOUR,
    ("w128x64_c1", Case(50, 144, 416, 32, "float4_e2m1fn", scale="f8e8m0fnu")),
    ("w128x64_c1", Case(50, 80, 256, 128, "int8", scale="f8e4m3fn", columns=True)),
    ("w128x64_c1", Case(40, 80, 288, 32, "float8_e4m3fn", scale="f8e8m0fnu")),
    (
        "w128x64_c2",
        Case(
            90,
            80,
            256,
            32,
            "uint4",
            zeros=True,
            x="f16",
            sizes=(3, 0, 70, 1, 8),
            offset=1,
            experts=3,
        ),
    ),
]


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    cases = [(params["config"], params["case"]) for params in cases_of(test_products)]
    return machine_of(run_folder / "packed_wide", cases)


@pytest.mark.parametrize(("config", "case"), CASES, ids=lambda x: getattr(x, "label", x))
def test_products(machine, config, case):
    for seed in range(3):
        check(machine, config, case, seed=seed)


def test_sums_of_whole_columns_would_be_wrong():
    """What tensor cores keep of sums, 13 bits of mantissa after each 32 of K, without parts."""
    _, case = FLOAT8_PARTS
    x = case.x_array.astype(np.float64) * case.row_scales[:, None].astype(np.float64)
    sums = np.zeros((case.m, case.n))
    for start in range(0, case.k, 32):
        own = slice(start, start + 32)
        mantissa, exponent = np.frexp(sums + x[:, own] @ case.exact_weight[own])
        sums = np.ldexp(np.trunc(mantissa * 2**14) / 2**14, exponent)
    assert case.mismatch(sums)


KERNEL, FRAGMENTS = "kernels/packed/wide_kernel.cuh", "kernels/packed/fragments.cuh"
BLOCK = "kernels/packed/wide_block.cuh"
SUMS = "kernels/packed/sums.cuh"

MISTAKES = [
    Mistake(KERNEL, "stages_not_awaited", case=SPLIT),
    Mistake(
        BLOCK, "stages_overwritten", case=RING, finds="wrong|more often than it expects|deadlock"
    ),
    Mistake(
        BLOCK,
        "stages_released_by_one_warp",
        "kConsumerWarps * kTile.multicast_size",
        "1",
        RING,
        "wrong|more often than it expects|deadlock",
    ),
    Mistake(
        BLOCK,
        "too_few_bytes",
        "kGeometry.loaded_bytes()",
        "kGeometry.x_bytes()",
        SPLIT,
        "wrong|deadlock|more often than it expects",
    ),
    Mistake(
        KERNEL,
        "groups_not_awaited",
        case=SPLIT,
        finds="wrong|while wgmma works on its accumulators",
    ),
    Mistake(KERNEL, "registers_not_fenced", case=SPLIT, finds="no wgmma.fence has handed over"),
    Mistake(KERNEL, "group_not_begun", "!begins || step != 0", "true", SPLIT),
    Mistake(KERNEL, "steps_exchanged", "step * (32 >> 4)", "(1 - step) * (32 >> 4)", SPLIT),
    Mistake(
        KERNEL, "blocks_of_k_exchanged", "first_k % kRowK", "(first_k + kBlockK) % kRowK", SPLIT
    ),
    Mistake(KERNEL, "blocks_of_k_of_8_bits", "first_k % kRowK", "first_k % (kRowK / 2)", FLOAT8),
    Mistake(KERNEL, "halves_of_k_exchanged", "first_k / kRowK", "(1 - first_k / kRowK)", SPLIT),
    Mistake(BLOCK, "x_of_the_next_stage", "stage", "stage + 1", SPLIT),
    Mistake(
        KERNEL,
        "scale_of_the_next_group",
        "group_place(block) * 16",
        "group_place(block) * 16 + 16",
        SPLIT,
    ),
    Mistake(KERNEL, "scales_of_columns_exchanged", "i % 4 < 2", "i % 4 >= 2", SPLIT),
    Mistake(
        KERNEL,
        "zeros_of_the_next_column",
        "group_place(block) * 32",
        "group_place(block) * 32 + 4",
        SPLIT,
    ),
    Mistake(
        KERNEL,
        "scales_of_the_next_tile",
        "weight_tile(tile())",
        "weight_tile(tile()) + 1",
        COLUMNS,
    ),
    Mistake(
        KERNEL,
        "zeros_of_the_next_tile",
        "weight_tile(tile())",
        "weight_tile(tile()) + 1",
        COLUMNS,
    ),
    Mistake(FRAGMENTS, "nibbles_swapped", "4 * p", "4 * (p ^ 1)", SPLIT),
    Mistake(FRAGMENTS, "halves_of_the_table", "entry % 16", "entry / 16", TABLE),
    Mistake(FRAGMENTS, "byte_of_the_table", "9", "17", TABLE),
    Mistake(BLOCK, "accumulators_not_awaited", case=RING),
    Mistake(
        BLOCK, "stages_overwritten_by_accumulators", case=SPLIT, finds="wrong|fence.proxy.async"
    ),
    Mistake(BLOCK, "blocks_not_begun", case=SPLIT, finds="wrong|which the block has not got"),
    Mistake(BLOCK, "shares_not_awaited", case=SPLIT, finds="ended|wrong"),
    Mistake(
        BLOCK,
        "multicast_not_begun",
        case=SHARED,
        finds="not initialised|which the block has not got|which the cluster has not got",
    ),
    Mistake(
        BLOCK, "multicast_not_awaited", "kTile.multicast_size", "1", SHARED, "more often|deadlock"
    ),
    Mistake(BLOCK, "multicast_cluster_left", "left > 0", "false", SHARED, "block that has ended"),
    Mistake(BLOCK, "halves_of_x_exchanged", "half * kK", "(1 - half) * kK", SHARED),
    Mistake(BLOCK, "rows_of_x_exchanged", "half * kRows", "(1 - half) * kRows", FLOAT8_SHARED),
    Mistake(KERNEL, "units_forgotten", "kUnit * scales.x", "scales.x", FLOAT8),
    Mistake(FRAGMENTS, "sign_of_8_bits", "0x81u", "0x80u", FLOAT8),
    Mistake(FRAGMENTS, "zeros_of_8_bits_exchanged", "p % 2", "1 - p % 2", FLOAT8_ZEROS),
    Mistake(FRAGMENTS, "words_of_8_bits_exchanged", "p / 2", "1 - p / 2", FLOAT8),
    Mistake(SUMS, "scales_of_other_rows", "m_idx", "row", FLOAT8),
    Mistake(SUMS, "shares_of_one_place", "sender > receiver", "1", FOUR, "wrong|outside|deadlock"),
    Mistake(SUMS, "sums_of_one_block", "kSums.cluster", "1", SPLIT),
]


@pytest.fixture(scope="module")
def mistaken(machine, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    products = [params["mistake"].case for params in cases_of(test_mistakes_are_found)]
    return mistaken_of(machine, run_folder / "packed_wide_mistaken", MISTAKES, products)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    """Some show in every order of events, others take a few."""
    mistaken.mutant = MISTAKES.index(mistake) + 1
    found = ""
    for seed in range(12):
        try:
            check(mistaken, *mistake.case, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(mistake.finds, found), found


OF_THE_COPY = Mistake("kernels/packed/order_kernel.cuh", "bytes_exchanged", "0x3120", "0x3210")


def test_a_mistake_of_the_copy_of_x_is_found(machine, run_folder):
    folder = run_folder / "packed_order_mistaken"
    mistaken = mistaken_of(machine, folder, [OF_THE_COPY], [FLOAT8])
    mistaken.mutant = 1
    with pytest.raises(AssertionError, match="wrong"):
        check(mistaken, *FLOAT8)
