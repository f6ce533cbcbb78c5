"""wgmma kernels of 8-bit floats, emulated: what they multiply, and that their sums are promoted."""

import dataclasses
import functools
import re

import emulated
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from emulated_checks import CASE, NO_PROMOTION, check, function_of_product
from gpu.gemm_call import Case, Types
from kernel_instances import wgmma
from mistakes import Mistake

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

PROMOTED = "f8e4m3fn,f8e4m3fn"
FAST = "f8e4m3fn,f8e4m3fn fast_accum"
COOPERATIVE, PING_PONG = "128x128x64_c1x1x1_co", "64x128x64_c1x1x1_pp"
# Whose tiles are promoted in two parts, and one that has no registers for that.
LARGE, TOO_LARGE = "128x256x64_c2x1x1_co", "192x192x64_c1x1x1_co"
CONFIGS = {
    COOPERATIVE: "128, 128, 1, 1, 1, false, false",
    "128x128x64_c2x2x1_co": "128, 128, 2, 2, 1, false, false",
    "64x96x64_c1x1x1_pp_t": "64, 96, 1, 1, 1, true, true",
    "64x64x64_c1x1x2_pp": "64, 64, 1, 1, 2, true, false",
    PING_PONG: "64, 128, 1, 1, 1, true, false",
    LARGE: "128, 256, 2, 1, 1, false, false",
}
CASE |= {"ten_k_blocks": Case("ten_k_blocks", 133, 203, 1270)}


# Of rows and columns, with a matrix that follows: in boxes where tiles are cooperative.
FUNCTION_CONFIGS = COOPERATIVE, PING_PONG
M, N, K = 264, 200, 1000


def scaled(acc, row, column, residual):
    return (acc * row * column + residual).astype(jnp.bfloat16)


@functools.cache
def function_call():
    """The problem of a scaled product with rows of K, and its function's operands."""
    rng = np.random.default_rng(7)
    row, column = (2.0 ** rng.integers(-2, 3, x) for x in ((M, 1), (1, N)))
    residual = rng.integers(-99, 99, (M, N)).astype(DTYPES["bf16"])
    operands = row.astype(np.float32), column.astype(np.float32), residual
    problem, used = function_of_product(scaled, operands, (M, N, K), DTYPES["f8e4m3fn"], np.float32)
    return problem, operands, used


def function_kernel(config):
    function = function_call()[0].epilogue.function
    struct = f"Function<tcgemm::elementwise::{function.name}>"
    own = wgmma(CONFIGS[config], struct, PROMOTED, layout="00")
    return carried(dataclasses.replace(own, definitions=function.definitions))


def kernel(config, instruction=PROMOTED):
    return carried(wgmma(config, "Bare", instruction, layout="00"))


@pytest.fixture(scope="session")
def kernels(run_folder):
    """Those of all tests here."""
    sources = [kernel(config) for config in CONFIGS.values()]
    sources += [kernel(CONFIGS[LARGE], FAST)]
    for types in ("f8e4m3fn,f8e5m2", "f8e5m2,f8e4m3fn", "f8e5m2,f8e5m2"):
        sources.append(kernel(CONFIGS[COOPERATIVE], types))
    sources += map(function_kernel, FUNCTION_CONFIGS)
    return Emulator(run_folder / "fp8", *sources)


@pytest.mark.parametrize(
    "label", ["ten_k_blocks", "all_odd", "no_k", "batch_of_2_by_3_one_a_for_3"]
)
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(kernels, config, label):
    """Operands that are K-major, and others, which are copied first."""
    for seed, (layout, out) in enumerate([("NT", "f32"), ("TN", "bf16"), ("NN", "f16")]):
        types = Types("f8e4m3fn", out, "f32")
        how = {"implementation": "wgmma", "config": config, "seed": seed + len(label)}
        check(kernels, types, layout, CASE[label], **how)


def test_split_k(kernels):
    types = Types("f8e4m3fn", "f32", "f32")
    how = {"implementation": "wgmma", "config": f"{COOPERATIVE}_split3", "seed": 3}
    check(kernels, types, "NT", CASE["ten_k_blocks"], **how)


def test_scales_of_batches(kernels):
    types = Types("f8e4m3fn", "bf16", "f32")
    how = {"implementation": "wgmma", "config": PING_PONG, "seed": 1}
    check(kernels, types, "NT", CASE["alpha_beta_odd_batch"], **how)


@pytest.mark.parametrize("config", FUNCTION_CONFIGS)
def test_scales_as_a_function(kernels, config):
    """Of promoted sums, which it takes in float32."""
    problem, operands, used = function_call()
    rng = np.random.default_rng(8)
    a = rng.integers(-1, 8, (M, K), endpoint=True).astype(DTYPES["f8e4m3fn"])
    b = rng.integers(-1, 8, (N, K), endpoint=True).astype(DTYPES["f8e4m3fn"])
    arrays = {"a": a, "b": b}
    arrays |= {f"function operand {i}": operands[number] for i, number in enumerate(used)}
    got = kernels.run(problem, arrays, implementation="wgmma", config=config, seed=4)[0]
    sums = a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(got.reshape(M, N), scaled(jnp.asarray(sums), *operands))


@pytest.mark.parametrize("types", ["f8e4m3fn,f8e5m2", "f8e5m2,f8e4m3fn", "f8e5m2,f8e5m2"])
def test_pairs(kernels, types):
    how = {"implementation": "wgmma", "config": COOPERATIVE, "seed": len(types)}
    check(kernels, Types(types, "f32", "f32"), "NT", CASE["all_odd"], **how)


def test_fast_accumulation(kernels):
    how = {"implementation": "wgmma", "config": LARGE, "seed": 2}
    check(kernels, Types("f8e4m3fn", "f32", "f32_fast_accum"), "NT", CASE["all_odd"], **how)


def long_sums(emulator, config=COOPERATIVE, compute="f32", types=PROMOTED):
    """What comes of sums of 2048 products that the tensor core alone cannot hold, and the sums.

    Integers up to 8 in magnitude, nearly all positive: 128 products of them have sums below
    2^13, which it adds without rounding, 2048 of them well over 2^14, of which it keeps 14 bits.
    """
    m, n, k = 130, 136, 2048
    rng = np.random.default_rng(5)
    a_dtype, b_dtype = types.split(",")
    a = rng.integers(-1, 8, (m, k), endpoint=True).astype(DTYPES[a_dtype])
    b = rng.integers(-1, 8, (n, k), endpoint=True).astype(DTYPES[b_dtype])
    operands = Operand(a_dtype, False, k), Operand(b_dtype, True, k)
    problem = Problem(1, 1, m, n, k, *operands, "f32", compute)
    how = {"implementation": "wgmma", "config": config}
    got = emulator.run(problem, {"a": a, "b": b}, **how)[0].reshape(m, n)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    assert expected.max() > 2**14
    return got, expected


@pytest.mark.parametrize("config", CONFIGS)
def test_sums_are_promoted(kernels, config):
    """Products are added in float32: exactly, as long as the sums of integers are below 2^24."""
    np.testing.assert_array_equal(*long_sums(kernels, config))


def test_fast_accumulation_leaves_sums_in_the_tensor_core(kernels):
    got, expected = long_sums(kernels, LARGE, "f32_fast_accum")
    # 64 instructions, each of which truncates sums below 2^15 by less than 2.
    assert 0 < (expected - got).max() < 64 * 2


def test_large_tiles_have_no_registers_for_promoted_sums(kernels):
    refused = f"config {TOO_LARGE} has too many accumulators for a second set in registers"
    with pytest.raises(RuntimeError, match=re.escape(refused)):
        long_sums(kernels, TOO_LARGE)


MULTIPLY, KERNEL = "kernels/wgmma/multiply.cuh", "kernels/wgmma/kernel.cuh"
SCALES = "kernels/wgmma/scales.cuh"
MISTAKES = [
    Mistake(MULTIPLY, "not_started_anew", "false", "true"),
    Mistake(SCALES, "not_added", "+=", "="),
    Mistake(MULTIPLY, "not_waited_for"),
    Mistake(KERNEL, "accumulators_of_the_tile_before"),
    Mistake(MULTIPLY, "wrong_half_of_k", "step * kStepB", "step % 2 * kStepB"),
    Mistake("kernels/wgmma/traits.cuh", "half_of_a_k_block", "kTileK / kMmaK", "2"),
    Mistake(MULTIPLY, "exchanged_types", "A, typename Mma::B", "B, typename Mma::A"),
    Mistake("kernels/wgmma/loads.cuh", "another_step", "T::kTileK", "T::kTileK / 2"),
]


@pytest.mark.parametrize(
    "mistakes", [NO_PROMOTION, *([x] for x in MISTAKES)], ids=lambda x: x[0].marker
)
def test_mistakes_are_found(kernels, mistakes, tmp_path):
    types = "f8e4m3fn,f8e5m2" if mistakes[0].marker == "exchanged_types" else PROMOTED
    source = kernel(CONFIGS[COOPERATIVE], types)
    wrong = Emulator(tmp_path, source, mistakes=mistakes, like=kernels)
    with pytest.raises(
        (AssertionError, RuntimeError), match="not equal|wrote to registers|wgmma works"
    ):
        np.testing.assert_array_equal(*long_sums(wrong, types=types))


def test_values_of_every_8_bit_float(kernels):
    """Each by one: NaN, infinities, subnormal numbers and zeros of both dtypes."""
    for name in ("f8e4m3fn", "f8e5m2"):
        dtype = DTYPES[name]
        a = np.zeros((256, 16), np.uint8)
        a[:, 0] = np.arange(256)
        a = a.view(dtype)
        b = np.zeros((8, 16), dtype)
        b[:, 0] = 1
        problem = Problem(
            *(1, 1, 256, 8, 16, Operand(name, False, 16), Operand(name, True, 16), "f32", "f32")
        )
        how = {"implementation": "wgmma", "config": COOPERATIVE}
        got = kernels.run(problem, {"a": a, "b": b}, **how)[0].reshape(256, 8)
        # What the tensor core keeps holds each of them. Infinities times zero are not multiplied.
        expected = np.broadcast_to(a[:, :1].astype(np.float32), (256, 8))
        np.testing.assert_array_equal(got, expected)
        assert not np.isfinite(expected).all()
