"""The kernel of packed weights and many rows run by the emulator, and what it must find."""

import re

import emulated
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
CASES = [
    RING,
    SHARED,
    SPLIT,
    TABLE,
    COLUMNS,
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
    "blocks_of_k_exchanged": (KERNEL, "block % 2 * 64", "(1 - block % 2) * 64", SPLIT, WRONG),
    "halves_of_k_exchanged": (
        *(KERNEL, "block / 2 * kHalfBytes", "(1 - block / 2) * kHalfBytes", SPLIT, WRONG),
    ),
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
    "halves_of_x_exchanged": (KERNEL, "half * kHalfK", "(1 - half) * kHalfK", SHARED, WRONG),
    "sums_of_one_block": (SUMS, "i < kSums.cluster", "i < 1", SPLIT, WRONG),
}


@pytest.fixture(scope="module")
def mistaken(machine, run_folder):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    changes = as_mutants(mistake[:3] for mistake in MISTAKES.values())
    products = dict.fromkeys(product for *_, product, _ in MISTAKES.values())
    found = [carried(x) for product in products for x in instances(*product)]
    folder = run_folder / "packed_wide_mistaken"
    return Emulator(folder, *found, families=("packed",), changes=changes, like=machine)


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
