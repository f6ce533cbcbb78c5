"""The quantizing kernels run by the emulator of tests/emulator, and what it must find."""

import re

import emulated
import pytest
from emulated import Emulator, carried
from mistakes import Mistake
from quantize_cases import Case, instances

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

LINES, BLOCKS = (
    Case(form, 300, 272, transposed=True, batch=2, special=form == "lines")
    for form in ("lines", "blocks")
)
ROWS = Case("rows", 11, 2600, "s8")
# Whole and short blocks, rows that lie on whole vectors and ones that do not, each of the types.
CASES = [
    LINES,
    BLOCKS,
    ROWS,
    Case("lines", 128, 256, transposed=True),
    Case("lines", 37, 264, "f8e5m2", "f16"),
    Case("lines", 131, 70, "s8", "f32", transposed=True),
    Case("blocks", 131, 200, "f8e5m2", "f32", special=True),
    Case("blocks", 250, 130, "s8", "f16", transposed=True),
    Case("scaled", 150, 140, batch=2, transposed=True),
    Case("scaled", 3, 1000, "f8e5m2", "f32"),
    Case("rows", 9, 264, "f8e5m2", "f32", special=True),
    Case("rows", 2, 9000),
    Case("rows", 1, 1, "f8e4m3fn", "f16"),
    Case("rows", 6, 1501, "f8e4m3fn", "f16"),
]


@pytest.fixture(scope="module")
def machine(run_folder):
    found = {x: None for case in CASES for x in instances(case)}
    folder = run_folder / "quantize"
    return Emulator(folder, *map(carried, found), families=("quantize",), sanitize=True)


def check(machine, case, **how):
    got = machine.run(case.problem, case.arrays, implementation="quantize", config="default", **how)
    if wrong := case.mismatch(got):
        raise AssertionError(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda x: x.label)
def test_values_and_scales(machine, case):
    for seed in range(2):
        check(machine, case, seed=seed)


TILES, ROW_KERNEL = "kernels/quantize/tile_kernel.cuh", "kernels/quantize/row_kernel.cuh"
NUMBERS = "kernels/quantize/numbers.cuh"

MISTAKES = [
    Mistake(
        TILES,
        "maximum_of_half_a_row",
        "kColumnThreads",
        "kColumnThreads / 2",
        LINES,
        r"\d values are wrong",
    ),
    Mistake(TILES, "maximum_of_every_other_row", case=LINES, finds="transposed_values are wrong"),
    Mistake(
        TILES,
        "maximum_of_too_few_warps",
        "warp = 0",
        "warp = 1",
        LINES,
        "transposed_values are wrong",
    ),
    Mistake(TILES, "maxima_not_awaited", case=LINES),
    Mistake(TILES, "scales_not_awaited", case=LINES),
    Mistake(TILES, "columns_not_awaited", case=LINES),
    Mistake(
        TILES,
        "scales_of_columns_as_of_rows",
        "tile_rows + row_block_",
        "tile_columns + column_block_",
        LINES,
        "transposed_scales are wrong|outside",
    ),
    Mistake(TILES, "chunks_not_exchanged", "!= 0", "== 0", LINES, "transposed_values are wrong"),
    Mistake(
        TILES, "chunks_not_permuted", " ^ column_group_", "", BLOCKS, "transposed_values are wrong"
    ),
    Mistake(TILES, "rows_beyond_the_last", "< rows_left", "<= rows_left", LINES, "wrong|outside"),
    Mistake(
        TILES,
        "tail_of_a_row_lost",
        "? params_.columns - first_column()",
        "&& first_column() + 16 < params_.columns ? kBlock",
        LINES,
    ),
    Mistake(
        TILES,
        "blocks_as_rows",
        "column * params_.tile_rows + row_block_",
        "row * params_.tile_columns + column_block_",
        BLOCKS,
        "transposed_scales are wrong",
    ),
    Mistake(TILES, "block_of_one_warp", " + warp * 4", "", BLOCKS),
    Mistake(
        TILES,
        "entry_of_the_batch",
        "batch_",
        "0",
        Case("scaled", 150, 140, batch=2, transposed=True),
    ),
    Mistake(NUMBERS, "nan_is_no_number", "ptx::max_nan_f32", "::fmaxf", LINES),
    Mistake(NUMBERS, "scale_of_zeros", "1.17549435e-38f", "1e-30f", LINES, r"\d scales are wrong"),
    Mistake(NUMBERS, "halves_of_a_word", "(i % 2)", "(1 - i % 2)", LINES, r"\d values are wrong"),
    Mistake(NUMBERS, "order_of_bytes", "16", "0", LINES, r"\d values are wrong"),
    Mistake(ROW_KERNEL, "rest_of_a_row_not_looked_at", case=Case("rows", 2, 9000)),
    Mistake(ROW_KERNEL, "row_of_one_warp", " + warp", "", ROWS),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(machine, run_folder, mistake):
    mistaken = Emulator(
        run_folder / f"quantize_{mistake}",
        *map(carried, instances(mistake.case)),
        families=("quantize",),
        mistakes=[mistake],
        like=machine,
    )
    found = ""
    for seed in range(12):
        try:
            check(mistaken, mistake.case, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(mistake.finds, found), found
