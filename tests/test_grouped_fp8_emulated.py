"""Grouped products of 8 bits, of floats with block scales and without, emulated."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from emulated import Emulator, carried
from emulated_checks import group_arrays, ragged_problem
from kernel_instances import wgmma_ragged
from mistakes import Mistake
from mutants import WRONG, mutants

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.primitives import epilogue_product
from jax_tcgemm.primitives.encodings.ragged_block_scaled import RaggedBlockScaled
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import ScaleStrides

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
WIDE, NARROW = "128x256x64_c2x1x1_co_t", "128x64x64_c1x1x1_co_t"
CONFIGS = {
    WIDE: "128, 256, 2, 1, 1, false, true",
    NARROW: "128, 64, 1, 1, 1, false, true",
}
# Of what rows and how much of K there is a scale, of tokens and of matrices.
BLOCKS = {
    "rows by blocks": ((1, 128), (128, 128)),
    "rows by rows": ((1, 256), (1, 128)),
    "one by blocks": ((1 << 20, 1 << 20), (192, 128)),
}
# Widths of one part and of two, of a tile's half, an empty group, and tokens that are left over.
SIZES = [3, 0, 140, 250, 513, 64]
LEFT_OVER = 40


def scaled_rows(blocks) -> tuple[int, int]:
    """What the kernel is compiled for: the matrices are its A."""
    return 64 if blocks[1][0] % 64 == 0 else 1, 1


def kernel(config, blocks=None, instruction=f"{E4M3},{E4M3}"):
    how = {} if blocks is None else {"scaled_rows": scaled_rows(blocks)}
    return carried(wgmma_ragged(CONFIGS[config], "Bare", instruction, **how))


@pytest.fixture(scope="session")
def kernels(run_folder, cases_of):
    """The kernels of all tests here that run."""
    cases = [(x["config"], BLOCKS.get(x["blocks"])) for x in cases_of(test_configs)]
    cases += [(x, BLOCKS["rows by blocks"]) for x in CONFIGS] + [(NARROW, None)]
    sources = [kernel(*case) for case in cases]
    types = f"{E5M2},{E5M2}", f"{E4M3},{E4M3} fast_accum"
    sources += [kernel(NARROW, instruction=x) for x in types]
    sources += [kernel(x, instruction="s8,s8") for x in CONFIGS]
    return Emulator(run_folder / "grouped_fp8", *dict.fromkeys(sources), planned_kernel())


def draw_scales(rng, shape, k, block) -> tuple[ScaleStrides, np.ndarray]:
    """Powers of two for (groups, rows), by which sums of integers stay exact, with NaN behind."""
    groups, extent = shape
    rows, depth = block
    values = np.full((groups, -(-extent // rows), -(-k // depth) + 3), np.nan, np.float32)
    values[..., :-3] = 2.0 ** rng.integers(-1, 2, (*values.shape[:2], values.shape[2] - 3))
    stride = values.shape[2]
    inner = 0 if groups == 1 else stride * values.shape[1]
    return ScaleStrides(rows, depth, stride, 1, 0, inner), values


def spread(strides: ScaleStrides, values, extent, k):
    rows, depth = np.arange(extent) // strides.rows, np.arange(k) // strides.depth
    return values[:, rows[:, None], depth].astype(np.float64)


def check(emulator, config, blocks=None, sizes=SIZES, n=200, k=400, dtype=E4M3, **fields):
    """One product, with NaN in the rows of no group."""
    rng, groups = np.random.default_rng([n, k, *sizes]), len(sizes)
    m = sum(sizes) + LEFT_OVER
    a, b = (rng.integers(-8, 8, x, endpoint=True) for x in ((m, k), (groups, n, k)))
    tokens = a.astype(DTYPES[dtype])
    tokens[sum(sizes) :] = 99 if dtype == "s8" else np.nan
    arrays = {"a": tokens, "b": b.astype(DTYPES[dtype]), **group_arrays(sizes)}
    wide = a.astype(np.float64), b.astype(np.float64)
    if blocks is not None:
        (sa, a_values), (sb, b_values) = (
            draw_scales(rng, x, k, block)
            for x, block in zip(((1, m), (groups, n)), blocks, strict=True)
        )
        fields["scales"] = sa, sb
        arrays |= {"a_scales": a_values, "b_scales": b_values}
        wide = wide[0] * spread(sa, a_values, m, k)[0], wide[1] * spread(sb, b_values, n, k)
    problem = ragged_problem("rows", groups, m, n, k, dtype, b_transposed=True)
    problem = dataclasses.replace(problem, **fields)
    got = emulator.run(problem, arrays, implementation="wgmma", config=config, seed=len(sizes))[0]
    expected = reference.rows(wide[0], wide[1].swapaxes(1, 2), sizes)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize("blocks", [None, *BLOCKS])
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(kernels, config, blocks):
    check(kernels, config, BLOCKS.get(blocks))


@pytest.mark.parametrize("config", CONFIGS)
def test_widths(kernels, config):
    """Every number of tokens that the instruction's width makes a difference of."""
    check(kernels, config, BLOCKS["rows by blocks"], [*range(1, 270, 8)], n=72, k=144)


def test_other_types(kernels):
    check(kernels, NARROW, dtype=E5M2)
    check(kernels, NARROW, compute="f32_fast_accum")


@pytest.mark.parametrize("config", CONFIGS)
def test_integers(kernels, config):
    how = {"dtype": "s8", "compute": "s32", "out_dtype": "s32"}
    check(kernels, config, **how)
    check(kernels, config, None, [*range(1, 270, 8)], n=72, k=144, **how)


# --- as the device layer asks for it --------------------------------------------------------------

GROUPS, M, N, K = 3, 300, 144, 272
PLANNED = [130, 0, 150]


def softened(acc, bias, scale):
    """Of a value for each column, and one for each group."""
    return (acc * scale + bias).astype(jnp.bfloat16)


@functools.cache
def planned() -> fused.Plan:
    """Of blocks of two tokens and of blocks of k that end short, with a function."""
    f8, i32 = jnp.float8_e4m3fn, jnp.int32
    shapes = ((M, K), f8), ((GROUPS, K, N), f8), ((GROUPS,), i32), ((1,), i32)
    shapes += ((M // 2, 3), jnp.float32), ((GROUPS, 2, 2), jnp.float32)
    shapes += ((N,), jnp.float32), ((GROUPS, 1, 1), jnp.float32)
    types = [jax.ShapeDtypeStruct(*x) for x in shapes]
    acc, of_rows = (jax.ShapeDtypeStruct((M, x), jnp.float32) for x in (N, 1))
    params = {
        "options": CallOptions("ragged_dot", "wgmma", WIDE),
        "in_place": None,
        "encoding": RaggedBlockScaled(GROUPS, blocks=((2, 128), (72, 256)), by_group=(False, True)),
        "function": jax.make_jaxpr(lambda *x: [softened(*x)])(acc, types[-2], of_rows),
    }
    product = epilogue_product.product_of(*types, params)
    return fused.make_plan(product, selection.target_device("cuda"))


def planned_kernel():
    function = planned().problem.function
    struct = f"Function<tcgemm::elementwise::{function.name}>"
    own = wgmma_ragged(CONFIGS[WIDE], struct, f"{E4M3},{E4M3}", scaled_rows=(1, 1))
    return carried(dataclasses.replace(own, definitions=function.definitions))


def check_planned(emulator):
    """Scales and operands by group are those of a row's group."""
    plan, rng = planned(), np.random.default_rng(9)
    a, b = (rng.integers(-8, 8, x, endpoint=True) for x in ((M, K), (GROUPS, N, K)))
    scales = [2.0 ** rng.integers(-1, 2, x) for x in ((M // 2, 3), (GROUPS, 2, 2))]
    bias, factor = rng.integers(-9, 9, N), np.arange(1, GROUPS + 1).reshape(-1, 1, 1)
    folded = [x.folded(jnp.float32(y)) for x, y in zip(plan.product.scales, scales, strict=True)]
    arrays = {"a": a.astype(DTYPES[E4M3]), "b": b.astype(DTYPES[E4M3]), **group_arrays(PLANNED)}
    arrays |= dict(zip(("a_scales", "b_scales"), map(np.asarray, folded), strict=True))
    given = bias.astype(np.float32), factor.astype(np.float32)
    numbers = enumerate(plan.folded.operands)
    arrays |= {f"function operand {i}": given[number] for i, number in numbers}
    (found,) = emulator.run(plan.problem, arrays, implementation="wgmma", config=WIDE)
    of_a = np.repeat(np.repeat(scales[0], 2, 0), 128, 1)[:, :K]
    of_b = np.repeat(np.repeat(scales[1], 72, 1), 256, 2)[:, :N, :K]
    acc = reference.rows(a * of_a, (b * of_b).swapaxes(1, 2), PLANNED)
    of_rows = np.repeat(factor[:, 0], PLANNED, 0)
    of_rows = np.concatenate([of_rows, np.zeros((M - sum(PLANNED), 1))])
    expected = softened(jnp.float32(acc), jnp.float32(bias), jnp.float32(of_rows))
    expected = np.where(np.arange(M)[:, None] < sum(PLANNED), expected, 0)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_planned(kernels):
    assert planned().is_fused
    assert planned().copies == ("rhs transposed to (groups, n, k)",)
    check_planned(kernels)


def test_refusals(kernels):
    for how, says in (
        ({"b_transposed": False}, "b must lie as (groups, n, k) where elements have 8 bits"),
        ({"scales": (ScaleStrides(1, 64, 9, 1),) * 2}, "multiple of 128 of k, got 64"),
        ({"scales": (ScaleStrides(1, 0, 9, 1),) * 2}, "extents must be in [1, 2^31), got 0"),
        ({"k": 392, "n": 204}, "k must be a multiple of 16, got 392"),
        ({"dtype": "s8", "compute": "s32"}, "the output of s8 inputs must be s32, got f32"),
        (
            {"compute": "f32_fast_accum", "blocks": BLOCKS["rows by blocks"]},
            "accumulators that are promoted",
        ),
    ):
        with pytest.raises(RuntimeError) as error:
            check(kernels, NARROW, **how)
        assert says in str(error.value)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize(
    ("types", "rows"), [(f"{E4M3},{E4M3}", (64, 1)), ("s8,s8", (0, 0))], ids=["blocks", "integers"]
)
def test_compiles_without_faults(types, rows):
    """Of the config with most sums."""
    own = wgmma_ragged(CONFIGS[WIDE], "Bare", types, scaled_rows=rows)
    assert nvrtc.compile_kernel(own).faults == ()


KERNEL, MULTIPLY = (f"kernels/wgmma/{name}.cuh" for name in ("ragged_kernel", "multiply"))
# The narrow one has fewer widths to compile, and one part.
ONE_PART, PARTS = ((x, "rows by blocks") for x in (NARROW, WIDE))
MISTAKES = [
    Mistake(KERNEL, "scales_of_the_first_group", "work.tokens.group", "0", ONE_PART),
    Mistake(KERNEL, "scales_of_the_first_tokens", "work.n_idx", "0", ONE_PART),
    Mistake(KERNEL, "scales_of_the_first_columns", "work.m_idx", "0", ONE_PART),
    Mistake(KERNEL, "nobody_waits_for_them", "1 + kScaleThreads", "1", ONE_PART),
    Mistake(KERNEL, "another_stages", "state.stage", "0", ONE_PART),
    Mistake(
        KERNEL,
        "released_twice",
        "T::kIsScaled ? thread_idx % 32 : thread_idx",
        "thread_idx % 32",
        (NARROW, None),
    ),
    Mistake(
        KERNEL,
        "accumulators_of_the_tile_before",
        "acc[block][i] = 0.0f;",
        "if (block > 0) acc[block][i] = 0.0f;",
        ONE_PART,
    ),
    Mistake(MULTIPLY, "half_of_the_columns", " + column * 128", "", PARTS),
    Mistake(
        MULTIPLY, "released_after_the_first_part", "column + kColumns >= kWidth", "true", PARTS
    ),
]
FUNCTION, STORE = "epilogue/function_reads.cuh", "kernels/wgmma/function_store.cuh"
MISTAKES_OF_FUNCTIONS = [
    Mistake(FUNCTION, "the_row_before_the_last", "end - count", "end - 2 * count"),
    Mistake(STORE, "a_part_is_left_out", "8 * kFirst", "8 * kFirst + 40"),
    Mistake(
        "kernels/wgmma/ragged_function.cuh",
        "operands_of_the_first_group",
        "max(work.tokens.group, 0)",
        "0",
    ),
]


ALL_MISTAKES = [*MISTAKES, *MISTAKES_OF_FUNCTIONS]


def kernels_of(case):
    return [planned_kernel() if case is None else kernel(case[0], BLOCKS.get(case[1]))]


def check_case(emulator, case):
    """A case of a mistake, of a plan where it is None."""
    if case is None:
        return check_planned(emulator)
    config, blocks = case
    check(emulator, config, BLOCKS.get(blocks), [*SIZES, 130])


@pytest.fixture(scope="session")
def mistaken(kernels, run_folder, cases_of):
    """Kernels that make one of ALL_MISTAKES, as `mutant` says, counted from 1."""
    tests = test_mistakes_are_found, test_mistakes_of_functions_are_found
    cases = [x["mistake"].case for test in tests for x in cases_of(test)]
    how = {"kernels_of": kernels_of, "check": check_case, "like": kernels}
    return mutants(run_folder / "grouped_fp8_mistaken", ALL_MISTAKES, cases, **how)


def check_found(mistaken, mistake):
    mistaken.mutant = ALL_MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match=WRONG):
        check_case(mistaken, mistake.case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    check_found(mistaken, mistake)


@pytest.mark.parametrize("mistake", MISTAKES_OF_FUNCTIONS, ids=str)
def test_mistakes_of_functions_are_found(mistaken, mistake):
    check_found(mistaken, mistake)
