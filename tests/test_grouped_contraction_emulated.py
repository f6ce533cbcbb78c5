"""Contractions over the tokens of each group, whose tokens are last, emulated."""

import dataclasses

import emulated
import numpy as np
import pytest
import ragged_reference as reference
from emulated import Emulator, carried
from emulated_checks import group_arrays, ragged_problem
from kernel_instances import wgmma, wgmma_ragged
from mistakes import Mistake
from mutants import WRONG, mutants

from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import ScaleStrides

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
CONFIG, SHAPE = "128x256x64_c2x1x1_co", "128, 256, 2, 1, 1, false, false"
INTEGERS = {"dtype": "s8", "compute": "s32", "out_dtype": "s32"}
# Of what rows and how many tokens there is a scale, of A and of B.
BLOCKS = {
    "rows by blocks": ((1, 128), (128, 128)),
    "rows by rows": ((1, 128), (1, 256)),
    "one by rows": ((1 << 20, 1 << 20), (1, 128)),
    "rows by pairs": ((1, 1 << 20), (2, 1 << 20)),
}
# Of all tokens: what sums are multiplied by once.
WHOLE = {"one": ((1 << 20, 1 << 20),) * 2, "rows": ((1, 1 << 20), (1, 1 << 20))}
# Inside one block of tokens, none, from one into the next, over many, and whole ones.
SIZES = [3, 0, 140, 41, 513, 71, 128, 200]
LEFT_OVER = 40


def kernel(blocks=None, instruction=f"{E4M3},{E4M3}"):
    if blocks is None or blocks in WHOLE.values():
        return carried(wgmma_ragged(SHAPE, "Bare", instruction))
    rows = (64 if blocks[0][0] % 64 == 0 else 1, 128 if blocks[1][0] % 128 == 0 else 1)
    return carried(wgmma_ragged(SHAPE, "Bare", instruction, scaled_rows=rows))


@pytest.fixture(scope="session")
def kernels(run_folder, cases_of):
    """The kernels of all tests here that run."""
    names = [None, "rows by rows", *(x["blocks"] for x in cases_of(test_blocks))]
    sources = [kernel(BLOCKS.get(name)) for name in names]
    types = f"{E5M2},{E5M2}", f"{E4M3},{E4M3} fast_accum", "s8,s8"
    sources += [kernel(instruction=x) for x in types]
    sources += [carried(wgmma(SHAPE, layout="00", kernel="ragged_kernel"))]
    return Emulator(run_folder / "grouped_contraction", *dict.fromkeys(sources))


def draw_scales(rng, rows, tokens, block) -> tuple[ScaleStrides, np.ndarray, np.ndarray]:
    """Powers of two, which leave sums exact, with NaN behind; and one for each element."""
    height, depth = block
    values = np.full((-(-rows // height), -(-tokens // depth) + 3), np.nan, np.float32)
    values[:, :-3] = 2.0 ** rng.integers(-1, 2, (values.shape[0], values.shape[1] - 3))
    own = values[np.arange(rows) // height][:, np.arange(tokens) // depth]
    return ScaleStrides(height, depth, values.shape[1], 1), values, own.astype(np.float64)


def check(
    emulator,
    blocks=None,
    sizes=SIZES,
    m=200,
    n=270,
    dtype=E4M3,
    left_over=LEFT_OVER,
    bad=None,
    **how,
):
    """One contraction, with NaN in the tokens of no group, and in one of the group `bad`."""
    rng, tokens = np.random.default_rng([m, n, *sizes]), sum(sizes) + left_over
    wide = [rng.integers(-8, 8, (x, tokens), endpoint=True).astype(np.float64) for x in (m, n)]
    spoilt = 99 if dtype == "s8" else np.nan
    stored = [x.copy() for x in wide]
    for x in stored:
        x[:, sum(sizes) :] = spoilt
        if bad is not None:
            x[:, sum(sizes[:bad]) + sizes[bad] // 2] = np.nan
    arrays = dict(zip("ab", (x.astype(DTYPES[dtype]) for x in stored), strict=True))
    arrays |= group_arrays(sizes)
    if blocks is not None:
        drawn = [draw_scales(rng, x, tokens, y) for x, y in zip((m, n), blocks, strict=True)]
        how["scales"] = tuple(x for x, _, _ in drawn)
        arrays |= {f"{name}_scales": x for name, (_, x, _) in zip("ab", drawn, strict=True)}
        wide = [x * own for x, (_, _, own) in zip(wide, drawn, strict=True)]
    problem = ragged_problem("contraction", len(sizes), m, n, tokens, dtype)
    problem = dataclasses.replace(problem, **{"tokens_last": True} | how)
    (got,) = emulator.run(problem, arrays, implementation="wgmma", config=CONFIG, seed=len(sizes))
    expected = reference.contraction(*(x.T for x in wide), sizes)
    if bad is not None:
        expected[bad] = np.nan
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize("blocks", [None, *BLOCKS, *WHOLE])
def test_blocks(kernels, blocks):
    check(kernels, (BLOCKS | WHOLE).get(blocks))


def test_borders(kernels):
    """Groups that begin and end at every place of 16 bytes, one token long and longer."""
    sizes = [1, *[x for i in range(17) for x in (1, 128 + i)], 16, 112, 1, 127]
    check(kernels, BLOCKS["rows by rows"], sizes, 72, 40, left_over=-sum(sizes) % 16)


@pytest.mark.parametrize("bad", [0, 3, 4])
def test_what_is_no_number_stays_in_its_group(kernels, bad):
    check(kernels, bad=bad)


def test_other_types(kernels):
    check(kernels, dtype=E5M2)
    check(kernels, compute="f32_fast_accum", blocks=WHOLE["rows"])
    check(kernels, **INTEGERS)
    check(kernels, dtype="bf16")


def test_refusals(kernels):
    blocks = BLOCKS["rows by rows"]
    for how, says in (
        (
            {"tokens_last": False},
            "a and b must lie as (m, k) and (n, k) where elements have 8 bits",
        ),
        (
            {"tokens_last": False, "blocks": blocks},
            "scales must be empty when form is contraction",
        ),
        ({"scales": (ScaleStrides(1, 64, 9, 1),) * 2}, "multiple of 128 of k, got 64"),
        ({"left_over": 41}, "k must be a multiple of 16, got 1137"),
        ({"form": "rows"}, "tokens_last must be false when form is rows"),
        ({"compute": "f32_fast_accum", "blocks": blocks}, "accumulators that are promoted"),
    ):
        with pytest.raises(RuntimeError) as error:
            check(kernels, **how)
        assert says in str(error.value)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize("rows", [(0, 0), (1, 1), (1, 128)])
def test_compiles_without_faults(rows):
    own = wgmma_ragged(SHAPE, "Bare", f"{E4M3},{E4M3}", scaled_rows=rows)
    assert nvrtc.compile_kernel(own).faults == ()


KERNEL = "kernels/wgmma/ragged_kernel.cuh"
MISTAKES = [
    Mistake(KERNEL, "tokens_before_the_group", "begin", "0"),
    Mistake(KERNEL, "tokens_after_the_group", "bits_before(end)", "32"),
    Mistake(KERNEL, "the_first_block_alone_is_cut", " || end < T::kTileK", ""),
    Mistake(KERNEL, "the_last_block_alone_is_cut", "begin > 0 || ", ""),
    Mistake(KERNEL, "not_as_it_is_swizzled", "(unit ^ row % 8)", "unit"),
    Mistake(KERNEL, "rows_of_a_alone", "row < kRows", "row < T::A::kExtent"),
    Mistake(KERNEL, "a_consumers_part_is_left_out", "consumer * 16", "16"),
    Mistake(KERNEL, "not_before_it_is_multiplied", "128", "0"),
    Mistake(
        KERNEL,
        "scales_of_the_first_k_block",
        "T::kIsRows ? 0 : first_token(work) / T::kTileK",
        "0",
    ),
    Mistake(KERNEL, "a_block_too_few", " + T::kTileK - 1", ""),
    Mistake(KERNEL, "from_the_groups_first_token", "/ T::kTileK * T::kTileK ", ""),
]
MISTAKES_OF_SUMS = [
    Mistake(KERNEL, "column_scales_of_the_first_tile", "n_idx + ", ""),
    Mistake(KERNEL, "row_scales_of_the_first_tile", "m_idx + ", ""),
    Mistake(KERNEL, "of_the_row_before", "1", "0"),
    Mistake(KERNEL, "of_another_lane", "group % 8 * 4 + ", ""),
    Mistake(KERNEL, "of_the_first_columns_of_a_lane", "group / 8", "0"),
    Mistake(KERNEL, "of_all_alike", "min(row, of.num_rows - 1) * of.row_stride", "0"),
]


ALL_MISTAKES = [*MISTAKES, *MISTAKES_OF_SUMS]


def blocks_of(mistake):
    return WHOLE["rows"] if mistake in MISTAKES_OF_SUMS else BLOCKS["rows by rows"]


@pytest.fixture(scope="session")
def mistaken(kernels, run_folder, cases_of):
    """Kernels that make one of ALL_MISTAKES, as `mutant` says, counted from 1."""
    cases = [blocks_of(x["mistake"]) for x in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda blocks: [kernel(blocks)], "check": check, "like": kernels}
    return mutants(run_folder / "grouped_contraction_mistaken", ALL_MISTAKES, cases, **how)


@pytest.mark.parametrize("mistake", ALL_MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = ALL_MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match=WRONG):
        check(mistaken, blocks_of(mistake))
