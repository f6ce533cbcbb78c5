"""The quantising kernels run by the emulator of tests/emulator, and what it must find."""

import re

import emulated
import pytest
from emulated import Emulator, carried
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
WRONG = " are wrong"

# File, what it holds, what to put in its place, the case that shows it, and what is then found.
MISTAKES = {
    "maximum_of_half_a_row": (
        *(TILES, "lanes < kColumnThreads; lanes *= 2", "lanes < kColumnThreads / 2; lanes *= 2"),
        *(LINES, r"\d values are wrong"),
    ),
    "maximum_of_every_other_row": (
        TILES,
        "largest[j] = max(largest[j], __shfl_xor_sync(~0u, largest[j], kColumnThreads));",
        "",
        *(LINES, "transposed_values are wrong"),
    ),
    "maximum_of_too_few_warps": (
        TILES,
        "for (int warp = 0; warp < kWarps; ++warp) {",
        "for (int warp = 1; warp < kWarps; ++warp) {",
        *(LINES, "transposed_values are wrong"),
    ),
    "maxima_not_awaited": (
        *(TILES, "__syncthreads();\n        set_column_scales();", "set_column_scales();"),
        *(LINES, WRONG),
    ),
    "scales_not_awaited": (
        *(TILES, "set_column_scales();\n        __syncthreads();", "set_column_scales();"),
        *(LINES, WRONG),
    ),
    "columns_not_awaited": (
        *(TILES, "__syncthreads();\n      store_columns();", "store_columns();", LINES, WRONG),
    ),
    "scales_of_columns_as_of_rows": (
        TILES,
        "params_.transposed_scales[line * params_.tile_rows + row_block_] = scale;",
        "params_.transposed_scales[line * params_.tile_columns + column_block_] = scale;",
        *(LINES, "transposed_scales are wrong|outside"),
    ),
    "chunks_not_exchanged": (
        *(TILES, "group % 2 != 0", "group % 2 == 0", LINES, "transposed_values are wrong"),
    ),
    "chunks_not_permuted": (
        *(TILES, "chunk = row_group_ ^ column_group_", "chunk = row_group_"),
        *(BLOCKS, "transposed_values are wrong"),
    ),
    "rows_beyond_the_last": (
        *(TILES, "if (i < rows_left) to[i]", "if (i <= rows_left) to[i]", LINES, "wrong|outside"),
    ),
    "tail_of_a_row_lost": (
        TILES,
        "return row(i) < params_.rows ? params_.columns - first_column() : 0;",
        "return row(i) < params_.rows && first_column() + 16 < params_.columns ? kBlock : 0;",
        *(LINES, WRONG),
    ),
    "blocks_as_rows": (
        TILES,
        "params_.transposed_scales[column * params_.tile_rows + row_block_] = scale;",
        "params_.transposed_scales[row * params_.tile_columns + column_block_] = scale;",
        *(BLOCKS, "transposed_scales are wrong"),
    ),
    "block_of_one_warp": (
        *(TILES, "ptx::ld_shared_u32(shared_ + warp * 4)", "ptx::ld_shared_u32(shared_)"),
        *(BLOCKS, WRONG),
    ),
    "entry_of_the_batch": (
        TILES,
        "params_.given[batch_]",
        "params_.given[0]",
        *(Case("scaled", 150, 140, batch=2, transposed=True), WRONG),
    ),
    "nan_is_no_number": (*(NUMBERS, "ptx::max_nan_f32(", "::fmaxf(", LINES, WRONG),),
    "scale_of_zeros": (
        *(NUMBERS, "kSmallestNormal = 1.17549435e-38f", "kSmallestNormal = 1e-30f"),
        *(LINES, r"\d scales are wrong"),
    ),
    "halves_of_a_word": (
        *(NUMBERS, "words[i / 2] >> 16 * (i % 2)", "words[i / 2] >> 16 * (1 - i % 2)"),
        *(LINES, r"\d values are wrong"),
    ),
    "order_of_bytes": (
        *(NUMBERS, "ptx::cvt_rn_satfinite_e4m3x2_f32(w, z) << 16", "0u | 0 * 16"),
        *(LINES, r"\d values are wrong"),
    ),
    "rest_of_a_row_not_looked_at": (
        ROW_KERNEL,
        "    largest = max(largest, other.largest());\n",
        "",
        *(Case("rows", 2, 9000), WRONG),
    ),
    "row_of_one_warp": (
        *(ROW_KERNEL, "threadIdx.x / kLanes * kWarps + warp", "threadIdx.x / kLanes * kWarps"),
        *(ROWS, WRONG),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(machine, run_folder, name):
    file, old, new, case, says = MISTAKES[name]
    mistaken = Emulator(
        run_folder / f"quantize_{name}",
        *map(carried, instances(case)),
        families=("quantize",),
        changes={file: [(old, new)]},
        like=machine,
    )
    found = ""
    for seed in range(12):
        try:
            check(mistaken, case, seed=seed)
        except (RuntimeError, AssertionError) as error:
            found = str(error)
            break
    assert re.search(says, found), found
