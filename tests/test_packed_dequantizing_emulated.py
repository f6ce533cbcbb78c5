"""The kernel that dequantizes packed weights before it multiplies, run by the emulator."""

import re

import emulated
import pytest
from mistakes import Mistake
from packed_cases import Case
from packed_emulated import check, machine_of, mistaken_of

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

# A config and the product that it runs: formats, rows and columns that fill no tile, K that fills
# no stage, CTAs of a cluster without any.
RING = ("d128x128_c1", Case(130, 208, 648, None, "int4"))  # six stages, used several times
SPLIT = ("d128x128_c2", Case(40, 144, 448, 64, "int4", zeros=True))
TABLE = ("d128x128_c1", Case(9, 40, 256, 32, "nf4", scale="f32"))
COLUMNS = ("d128x160_c1", Case(100, 136, 264, None, "uint8", zeros=True, x="f16", out="bf16"))
BYTES = ("d128x192_c1", Case(150, 144, 576, 32, "int8"))
FP4 = (
    "d128x64_c1",
    Case(40, 144, 272, 16, "float4_e2m1fn", scale="f8e4m3fn", columns=True),
)
CASES = [
    RING,
    FP4,
    ("d128x96_c1", Case(70, 80, 288, 32, "float4_e2m1fn", scale="f8e8m0fnu")),
    ("d128x128_c1", Case(70, 80, 288, 32, "float4_e2m1fn", scale="f8e8m0fnu", x="f16")),
    ("d128x64_c1", Case(70, 80, 288, 32, "float8_e4m3fn", scale="f8e8m0fnu")),
    ("d128x64_c1", Case(50, 80, 264, None, "float8_e5m2", scale="f32", x="f16")),
    ("d128x64_c2", Case(50, 80, 272, 16, "uint8", zeros=True, scale="f16", x="f16")),
    (
        "d128x64_c1",
        Case(
            90,
            80,
            256,
            16,
            "float4_e2m1fn",
            scale="f8e4m3fn",
            columns=True,
            sizes=(3, 0, 70, 1, 8),
            offset=1,
            experts=3,
        ),
    ),
    SPLIT,
    TABLE,
    COLUMNS,
    BYTES,
    ("d128x64_c4", Case(100, 136, 544, 32, "uint4", zeros=True, scale="f16", x="f16")),
    ("d128x256_c1", Case(200, 128, 256, 128, "int4", out="bf16")),
    ("d128x224_c1", Case(210, 128, 192, 64, "uint8", zeros=True, scale="f32", out="f16")),
    (
        "d128x128_c1",
        Case(90, 80, 256, 128, "uint4", zeros=True, sizes=(3, 0, 70, 1, 8), offset=1, experts=3),
    ),
]


@pytest.fixture(scope="module")
def machine(run_folder, cases_of):
    cases = [(params["config"], params["case"]) for params in cases_of(test_products)]
    return machine_of(run_folder / "packed_dequantizing", cases)


@pytest.mark.parametrize(("config", "case"), CASES, ids=lambda x: getattr(x, "label", x))
def test_products(machine, config, case):
    for seed in range(3):
        check(machine, config, case, seed=seed)


KERNEL, BLOCK = "kernels/packed/dequantizing_kernel.cuh", "kernels/packed/wide_block.cuh"
FRAGMENTS = "kernels/packed/fragments.cuh"

MISTAKES = [
    Mistake(KERNEL, "stages_not_awaited", case=SPLIT, finds="wrong|deadlock"),
    Mistake(KERNEL, "registers_not_fenced", case=SPLIT, finds="no wgmma.fence has handed over"),
    Mistake(KERNEL, "blocks_of_k_exchanged", "x + (kBlockK * sizeof(X) >> 4)", "x", SPLIT),
    Mistake(KERNEL, "steps_exchanged", "x + step * (32 >> 4)", "x + (1 - step) * 2", SPLIT),
    Mistake(FRAGMENTS, "scales_of_fragments_exchanged", "p % 2", "1 - p % 2", SPLIT),
    Mistake(KERNEL, "headroom_not_removed", case=FP4),
    Mistake(KERNEL, "chunks_exchanged", "block * kChunkBytes", "(1 - block) * kChunkBytes", BYTES),
    Mistake(KERNEL, "halves_of_a_chunk_exchanged", "block * 8", "(1 - block) * 8", SPLIT),
    Mistake(KERNEL, "group_of_another_block", "group", "0", TABLE),
    Mistake(KERNEL, "zeros_of_the_next_column", "lane_ / 4 * 4", "(lane_ / 4 ^ 1) * 4", SPLIT),
    Mistake(
        KERNEL,
        "scales_of_the_next_tile",
        "weight_tile(tile())",
        "weight_tile(tile()) + 1",
        COLUMNS,
    ),
    Mistake(KERNEL, "first_group_of_a_block", "lane_ % 4 / 2", "0", FP4),
    Mistake(
        BLOCK,
        "column_scales_of_the_next_tile",
        "weight_tile(tile())",
        "weight_tile(tile() ^ 1)",
        FP4,
    ),
    Mistake(BLOCK, "group_of_another_stage", "stage * kStageK / Weight::kGroup", "stage", BYTES),
]


@pytest.fixture(scope="module")
def mistaken(machine, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    products = [params["mistake"].case for params in cases_of(test_mistakes_are_found)]
    return mistaken_of(machine, run_folder / "packed_dequantizing_mistaken", MISTAKES, products)


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
