"""wgmma kernels of operands with block scales, emulated."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from kernel_instances import wgmma
from mistakes import Mistake
from mutants import WRONG, mutants

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.primitives import epilogue_product
from jax_tcgemm.primitives.encodings.block_scaled import BlockScaled
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem, ScaleStrides
from jax_tcgemm.selection.configs import WgmmaConfig

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

TYPES = "f8e4m3fn,f8e4m3fn"
COOPERATIVE, PING_PONG, SWAPPED = (
    "128x128x64_c1x1x1_co",
    "64x128x64_c1x1x1_pp",
    "64x96x64_c1x1x1_pp_t",
)
# Whose tiles are multiplied in two parts, by columns and by rows.
WIDE, HIGH = "128x256x64_c2x1x1_co", "256x128x64_c1x1x1_co_t"
CONFIGS = {
    COOPERATIVE: "128, 128, 1, 1, 1, false, false",
    "128x128x64_c2x2x1_co": "128, 128, 2, 2, 1, false, false",
    "64x64x64_c1x1x2_pp": "64, 64, 1, 1, 2, true, false",
    PING_PONG: "64, 128, 1, 1, 1, true, false",
    WIDE: "128, 256, 2, 1, 1, false, false",
    HIGH: "256, 128, 1, 1, 1, false, true",
    SWAPPED: "64, 96, 1, 1, 1, true, true",
}
# Of what rows and how much of K there is a scale, of A and of B.
BLOCKS = {
    "rows by blocks": ((1, 128), (128, 128)),
    "rows by rows": ((1, 128), (1, 128)),
    "blocks by blocks": ((128, 128), (128, 256)),
    "rows by one": ((1, 128), (1 << 20, 1 << 20)),
    "odd blocks": ((3, 384), (40, 128)),
}


def scaled_rows(blocks, config) -> tuple[int, int]:
    """What the kernel is compiled for."""
    parsed = WgmmaConfig.parse(config)
    (a, _), (b, _) = reversed(blocks) if parsed.swap_ab else blocks
    return 64 if a % 64 == 0 else 1, 128 if parsed.tile_n != 96 and b % 128 == 0 else 1


def kernel(config, blocks):
    config = config.partition("_split")[0]
    rows = scaled_rows(BLOCKS[blocks], config)
    return carried(wgmma(CONFIGS[config], "Bare", TYPES, layout="00", scaled_rows=rows))


@pytest.fixture(scope="session")
def kernels(run_folder, cases_of):
    """The kernels of all tests here that run."""
    wanted = [(x["config"], x["blocks"]) for x in cases_of(test_configs)]
    wanted += [(x, "rows by blocks") for x in (COOPERATIVE, SWAPPED)]
    sources = dict.fromkeys(kernel(*each) for each in wanted)
    return Emulator(run_folder / "block_scales", *sources, planned_kernel())


def draw_scales(rng, extent, k, block, batch) -> tuple[ScaleStrides, np.ndarray]:
    """Powers of two, by which sums of integers stay exact, in rows with NaN behind them."""
    rows, depth = block
    shape = batch, -(-extent // rows), -(-k // depth)
    values = np.full((*shape[:2], shape[2] + 3), np.nan, np.float32)
    values[..., : shape[2]] = 2.0 ** rng.integers(-1, 2, shape)
    stride = values.shape[2]
    return ScaleStrides(rows, depth, stride, 1, 0, shape[1] * stride), values


def repeated(strides: ScaleStrides, values, extent, k):
    rows, depth = np.arange(extent) // strides.rows, np.arange(k) // strides.depth
    return values[:, rows[:, None], depth].astype(np.float64)


def check(emulator, blocks, config, m=300, n=270, k=1000, batch=1, seed=0):
    """Operands and scales with two levels of strides, and extents that no tile divides."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-8, 8, (batch, x, k), endpoint=True) for x in (m, n))
    (sa, a_values), (sb, b_values) = (
        draw_scales(rng, x, k, block, batch) for x, block in zip((m, n), blocks, strict=True)
    )
    # TMA reads rows that begin at multiples of 16 bytes.
    ld = -(-k // 16) * 16
    arrays = {}
    for name, x in (("a", a), ("b", b)):
        arrays[name] = np.zeros((*x.shape[:2], ld), DTYPES["f8e4m3fn"])
        arrays[name][..., :k] = x
    arrays |= {"a_scales": a_values, "b_scales": b_values}
    operands = (
        Operand("f8e4m3fn", transposed, ld, 0, x * ld) for transposed, x in ((False, m), (True, n))
    )
    problem = Problem(batch, batch, m, n, k, *operands, "f32", "f32", scales=(sa, sb))
    got = emulator.run(problem, arrays, implementation="wgmma", config=config, seed=seed)[0]
    wide = a * repeated(sa, a_values, m, k), b * repeated(sb, b_values, n, k)
    np.testing.assert_array_equal(got.reshape(batch, m, n), wide[0] @ wide[1].swapaxes(1, 2))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(kernels, config, blocks):
    check(kernels, BLOCKS[blocks], config, seed=len(config) + len(blocks))


@pytest.mark.parametrize("config", [COOPERATIVE, SWAPPED])
def test_batches_and_few_rows(kernels, config):
    check(kernels, BLOCKS["rows by blocks"], config, m=5, n=130, k=130, batch=3)


def test_split_k(kernels):
    check(kernels, BLOCKS["rows by blocks"], f"{COOPERATIVE}_split3")


# --- as the device layer asks for it --------------------------------------------------------------

BATCH, M, N, K = 2, 140, 200, 400


def softened(acc, bias):
    return (acc + bias).astype(jnp.bfloat16), acc.max(-1)


@functools.cache
def planned() -> fused.Plan:
    """Of a batch, with a function, and blocks of two rows of K that end short."""
    types = [jax.ShapeDtypeStruct(x, jnp.float8_e4m3fn) for x in ((BATCH, M, K), (BATCH, N, K))]
    types += [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((BATCH, M // 2, 4), (1, 2, 2))]
    types += [jax.ShapeDtypeStruct((N,), jnp.float32)]
    acc = jax.ShapeDtypeStruct((BATCH, M, N), jnp.float32)
    params = {
        "options": CallOptions("scaled_matmul", "wgmma", COOPERATIVE),
        "in_place": None,
        "encoding": BlockScaled(1, ((2, 128), (128, 256))),
        "function": jax.make_jaxpr(softened)(acc, types[-1]),
    }
    product = epilogue_product.product_of(*types, params)
    return fused.make_plan(product, selection.target_device("cuda"))


def planned_kernel():
    function = planned().problem.epilogue.function
    struct = f"Function<tcgemm::elementwise::{function.name}>"
    own = wgmma(CONFIGS[COOPERATIVE], struct, TYPES, layout="00", scaled_rows=(1, 128))
    return carried(dataclasses.replace(own, definitions=function.definitions))


def test_planned(kernels):
    """Of a plan: where its scales lie, the function of scaled sums, and a reduction."""
    plan, rng = planned(), np.random.default_rng(9)
    assert plan.is_fused
    a, b = (rng.integers(-8, 8, (BATCH, x, K), endpoint=True) for x in (M, N))
    scales = [2.0 ** rng.integers(-1, 2, x) for x in ((BATCH, M // 2, 4), (1, 2, 2))]
    bias = rng.integers(-9, 9, N).astype(np.float32)
    folded = [x.folded(jnp.float32(y)) for x, y in zip(plan.product.scales, scales, strict=True)]
    arrays = {"a": a.astype(DTYPES["f8e4m3fn"]), "b": b.astype(DTYPES["f8e4m3fn"])}
    arrays |= dict(zip(("a_scales", "b_scales"), map(np.asarray, folded), strict=True))
    arrays |= {"function operand 0": bias}
    found = kernels.run(plan.problem, arrays, implementation="wgmma", config=COOPERATIVE)
    own = np.repeat(np.repeat(scales[0], 2, 1), 128, 2)[..., :K]
    acc = a * own @ (b * np.repeat(np.repeat(scales[1], 128, 1), 256, 2)[:, :N, :K]).swapaxes(1, 2)
    rounded, largest = softened(jnp.asarray(acc, jnp.float32), bias)
    np.testing.assert_array_equal(found[0].reshape(rounded.shape), rounded)
    assert largest.shape == (BATCH, M)
    np.testing.assert_array_equal(found[1].reshape(BATCH, M, -1).max(-1), largest)


def refused(kernels, *scales):
    """What is said of a product with these."""
    x, values = np.zeros((64, 256), DTYPES["f8e4m3fn"]), np.ones(64, np.float32)
    arrays = {"a": x, "b": x, "a_scales": values, "b_scales": values}
    operands = Operand("f8e4m3fn", False, 256), Operand("f8e4m3fn", True, 256)
    problem = Problem(1, 1, 64, 64, 256, *operands, "f32", "f32", scales=scales)
    with pytest.raises(RuntimeError) as error:
        kernels.run(problem, arrays, implementation="wgmma", config=COOPERATIVE)
    return str(error.value)


def test_refusals(kernels):
    good = ScaleStrides(64, 128, 2, 1)
    for change, says in (
        ({"depth": 64}, "the depth of block scales must be a multiple of 128 of k, got 64"),
        ({"rows": 0}, "a block's extents must be in [1, 2^31), got 0"),
        ({"row_stride": -1}, "strides of block scales must not be negative, got -1"),
    ):
        assert says in refused(kernels, dataclasses.replace(good, **change), good)


SCALES, MULTIPLY, KERNEL = (
    f"kernels/wgmma/{name}.cuh" for name in ("scales", "multiply", "kernel")
)
# Where rows have their own and columns one of a block, and where each has its own.
BY_BLOCKS, BY_ROWS = (WIDE, "rows by blocks"), (HIGH, "rows by rows")
SPLIT = (f"{WIDE}_split3", "rows by blocks")
MISTAKES = [
    Mistake(
        SCALES,
        "scales_of_the_k_block_before",
        "++k_block_",
        "k_block_ += k_block_ > 0",
        BY_BLOCKS,
    ),
    Mistake(SCALES, "not_of_the_row", " + thread_idx % 32 / 4", "", BY_BLOCKS),
    Mistake(SCALES, "of_the_first_eight_rows", "half * 8", "0", BY_ROWS),
    Mistake(SCALES, "rows_of_the_first_half", "(block + i)", "i", BY_ROWS),
    Mistake(SCALES, "not_of_columns", "of_columns", "1.0f", BY_BLOCKS),
    Mistake(
        SCALES, "columns_of_the_first_segment", "4 * (column / kColumnsPerScale)", "0", BY_BLOCKS
    ),
    Mistake(
        SCALES,
        "another_tiles",
        "row < from.num_rows",
        "row < from.num_rows && first_row == 0",
        BY_BLOCKS,
    ),
    Mistake(SCALES, "another_stages", " + stage * T::kScaleBytes", "", BY_BLOCKS),
    Mistake(KERNEL, "first_block_of_a_split", "work.first_k_block", "0", SPLIT),
    # The thread reads those of columns after the multiplication.
    Mistake(MULTIPLY, "released_too_early", " && !held.kReadsStage", "", (WIDE, "rows by rows")),
    Mistake(KERNEL, "nobody_waits_for_them", "1 + kScaleThreads", "1", BY_BLOCKS),
    Mistake("kernels/wgmma/pipeline.cuh", "released_by_one_warp", "kReleases", "1", BY_BLOCKS),
    Mistake(MULTIPLY, "half_of_the_columns", " + column * 128", "", BY_BLOCKS),
    Mistake(MULTIPLY, "half_of_the_rows", " + block * 8192", "", BY_ROWS),
]


def check_case(emulator, case, seed=0):
    config, blocks = case
    check(emulator, BLOCKS[blocks], config, m=520, seed=seed)


@pytest.fixture(scope="session")
def mistaken(kernels, run_folder, cases_of):
    """Kernels that make one of MISTAKES, as `mutant` says, counted from 1."""
    cases = [x["mistake"].case for x in cases_of(test_mistakes_are_found)]
    how = {"kernels_of": lambda case: [kernel(*case)], "check": check_case, "like": kernels}
    return mutants(run_folder / "block_scales_mistaken", MISTAKES, cases, **how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistaken, mistake):
    mistaken.mutant = MISTAKES.index(mistake) + 1
    with pytest.raises((AssertionError, RuntimeError), match=WRONG):
        any(check_case(mistaken, mistake.case, seed) for seed in range(3))
