"""The kernel of packed weights and many rows run by the emulator, and what it must find."""

import re

import emulated
import numpy as np
import pytest
from emulated import Emulator, as_mutants, carried
from packed_cases import Case, instances
from packed_emulated import check, machine_of

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

# A config and the product that it runs: formats, rows and columns that fill no tile, K that fills
# no stage, blocks of a cluster without any.
RING = ("w128x64_c1", Case(70, 208, 1152))  # four stages, used several times
SPLIT = ("w128x64_c2", Case(40, 144, 1856, 64, "int4", zeros=True))
TABLE = ("w128x64_c1", Case(9, 40, 512, 64, "nf4", scale="f32"))
COLUMNS = ("w128x128_c1", Case(100, 136, 1032, None, "uint8", zeros=True, x="f16", out="bf16"))
# The last block has no columns, and multiplies x for the other one all the same.
SHARED = ("w128x64_m2", Case(70, 272, 1152, 64, "int8"))
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
    ("w128x64_c4", Case(33, 128, 200, None, "int8", out="f16")),
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
def machine(run_folder):
    return machine_of(run_folder / "packed_wide", CASES)


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


KERNEL, PIECES = "kernels/packed/wide_kernel.cuh", "kernels/packed/pieces.cuh"
SUMS = "kernels/packed/sums.cuh"
WRONG = " are wrong"

# File, what it holds, what to put in its place, both expressions or whole statements, the product
# that shows it, and what is then found.
MISTAKES = {
    "stages_not_awaited": (
        *(KERNEL, "ptx::mbarrier_wait(barriers_.full(state.stage), state.phase);", ""),
        *(SPLIT, WRONG),
    ),
    "stages_overwritten": (
        *(KERNEL, "ptx::mbarrier_wait(barriers_.empty(state.stage), state.phase ^ 1);", "", RING),
        "wrong|more often than it expects|deadlock",
    ),
    "stages_released_by_one_warp": (
        *(KERNEL, "kConsumerWarps * kTile.sharers"),
        *("1", RING, "wrong|more often than it expects|deadlock"),
    ),
    "too_few_bytes": (
        *(KERNEL, "kGeometry.loaded_bytes()", "kGeometry.x_bytes()", SPLIT),
        "wrong|deadlock|more often than it expects",
    ),
    "groups_not_awaited": (
        KERNEL,
        "ptx::wgmma_wait_group<0>();\n    ptx::wgmma_fence_operand(part_);",
        "ptx::wgmma_fence_operand(part_);",
        SPLIT,
        "wrong|while wgmma works on its accumulators",
    ),
    "registers_not_fenced": (
        *(KERNEL, "ptx::wgmma_fence();", "", SPLIT, "no wgmma.fence has handed over"),
    ),
    "group_not_begun": (KERNEL, "!begins || step != 0", "true", SPLIT, WRONG),
    "steps_exchanged": (KERNEL, "step * (32 >> 4)", "(1 - step) * (32 >> 4)", SPLIT, WRONG),
    "blocks_of_k_exchanged": (
        *(KERNEL, "first_k % kRowK", "(first_k + kBlockK) % kRowK", SPLIT, WRONG),
    ),
    "blocks_of_k_of_8_bits": (
        *(KERNEL, "first_k % kRowK", "first_k % (kRowK / 2)", FLOAT8, WRONG),
    ),
    "halves_of_k_exchanged": (*(KERNEL, "first_k / kRowK", "(1 - first_k / kRowK)", SPLIT, WRONG),),
    "x_of_the_next_stage": (
        *(KERNEL, "stage * WideTile::kStageK", "(stage + 1) * WideTile::kStageK", SPLIT, WRONG),
    ),
    "scale_of_the_next_group": (
        *(KERNEL, "group_place(block) * 16", "group_place(block) * 16 + 16", SPLIT, WRONG),
    ),
    "scales_of_columns_exchanged": (KERNEL, "i % 4 < 2", "i % 4 >= 2", SPLIT, WRONG),
    "zeros_of_the_next_column": (
        *(KERNEL, "group_place(block) * 32", "group_place(block) * 32 + 4", SPLIT, WRONG),
    ),
    "scales_of_the_next_tile": (
        *(KERNEL, "(first_tile_ + tile()) * 16", "(first_tile_ + tile()) * 16 + 16"),
        *(COLUMNS, WRONG),
    ),
    "zeros_of_the_next_tile": (
        *(KERNEL, "(first_tile_ + tile()) * 8", "(first_tile_ + tile()) * 8 + 8"),
        *(COLUMNS, WRONG),
    ),
    "nibbles_swapped": (PIECES, "word >> 4 * p", "word >> 4 * (p ^ 1)", SPLIT, WRONG),
    "halves_of_the_table": (*(PIECES, "values[entry % 16]", "values[entry / 16]", TABLE, WRONG),),
    "byte_of_the_table": (PIECES, "word >> 9", "word >> 17", TABLE, WRONG),
    "sums_not_awaited": (
        KERNEL,
        "sums.put(0, tile(), j, sums_ + 4 * j);\n    sync_consumers();",
        "sums.put(0, tile(), j, sums_ + 4 * j);",
        RING,
        WRONG,
    ),
    "stages_overwritten_by_sums": (
        *(KERNEL, "consume();\n      sync_consumers();", "consume();", SPLIT, WRONG),
    ),
    "blocks_not_begun": (
        *(KERNEL, "ptx::cluster_wait();\n      sums.send(barriers_.sums());"),
        *("sums.send(barriers_.sums());", SPLIT, "wrong|which the block has not got"),
    ),
    "shares_not_awaited": (
        *(KERNEL, "ptx::mbarrier_wait_cluster(barriers_.sums(), 0);", "", SPLIT, "ended|wrong"),
    ),
    "sharers_not_begun": (
        KERNEL,
        "// The other block's barriers, too, are initialised.\n"
        "      ptx::cluster_arrive_relaxed();\n      ptx::cluster_wait();",
        "",
        SHARED,
        "not initialised|which the block has not got|which the cluster has not got",
    ),
    "sharers_not_awaited": (
        *(KERNEL, "lane_ < kTile.sharers", "lane_ < 1", SHARED, "more often|deadlock"),
    ),
    "sharers_left": (KERNEL, "left > 0", "false", SHARED, "block that has ended"),
    "halves_of_x_exchanged": (KERNEL, "half * kK", "(1 - half) * kK", SHARED, WRONG),
    "rows_of_x_exchanged": (KERNEL, "half * kRows", "(1 - half) * kRows", FLOAT8_SHARED, WRONG),
    "units_forgotten": (KERNEL, "kUnit * scales.x", "scales.x", FLOAT8, WRONG),
    "sign_of_8_bits": (PIECES, "is_below * 0x81u", "is_below * 0x80u", FLOAT8, WRONG),
    "zeros_of_8_bits_exchanged": (PIECES, "added[p % 2]", "added[1 - p % 2]", FLOAT8_ZEROS, WRONG),
    "words_of_8_bits_exchanged": (
        PIECES,
        "words[p / 2]",
        "words[1 - p / 2]",
        FLOAT8,
        WRONG,
    ),
    "scales_of_other_rows": (SUMS, "rows.scales[m_idx]", "rows.scales[row]", FLOAT8, WRONG),
    "sums_of_one_block": (SUMS, "i < kSums.cluster", "i < 1", SPLIT, WRONG),
}


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    changes = as_mutants(mistake[:3] for mistake in MISTAKES.values())
    products = dict.fromkeys(product for *_, product, _ in MISTAKES.values())
    found = [carried(x) for product in products for x in instances(*product)]
    folder = run_folder / "packed_wide_mistaken"
    made = Emulator(folder, *found, families=("packed",), changes=changes, like=machine)
    for product in products:  # Without any of them.
        check(made, *product)
    return made


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(mistaken, name):
    """Some show in every order of events, others take a few."""
    mistaken.mutant = list(MISTAKES).index(name) + 1
    *_, product, says = MISTAKES[name]
    found = ""
    for seed in range(12):
        try:
            check(mistaken, *product, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(says, found), found


def test_a_mistake_of_the_copy_of_x_is_found(run_folder):
    mistake = "kernels/packed/order_kernel.cuh", "0x3120", "0x3210"
    own, folder = map(carried, instances(*FLOAT8)), run_folder / "packed_order_mistaken"
    mistaken = Emulator(folder, *own, families=("packed",), changes=as_mutants([mistake]))
    check(mistaken, *FLOAT8)
    mistaken.mutant = 1
    with pytest.raises(AssertionError, match=WRONG):
        check(mistaken, *FLOAT8)
