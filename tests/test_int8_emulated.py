"""wgmma kernels of 8-bit integers, emulated: exact sums of both signs, and functions of them."""

import dataclasses
import functools
import re

import emulated
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from emulated_checks import function_of_product
from kernel_instances import wgmma
from mistakes import Mistake

from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

COOPERATIVE, SWAPPED, SPLIT = "128x128x64_c1x1x1_co", "64x96x64_c1x1x1_pp_t", "64x64x64_c1x1x4_pp"
CONFIGS = {
    COOPERATIVE: "128, 128, 1, 1, 1, false, false",
    "128x256x64_c2x1x1_co": "128, 256, 2, 1, 1, false, false",
    SWAPPED: "64, 96, 1, 1, 1, true, true",
    SPLIT: "64, 64, 1, 1, 4, true, false",
    "128x16x64_c1x1x4_co": "128, 16, 1, 1, 4, false, false",
}
PAIRS = "s8,s8", "s8,u8", "u8,s8", "u8,u8"


def kernel(config, instruction="s8,s8", epilogue="Bare"):
    return wgmma(CONFIGS[config], epilogue, instruction, layout="00")


@pytest.fixture(scope="session")
def kernels(run_folder):
    """Those of all tests here."""
    sources = [kernel(config) for config in CONFIGS]
    sources += [kernel(config, pair) for config in (COOPERATIVE, SWAPPED) for pair in PAIRS]
    sources += map(function_kernel, (COOPERATIVE, SWAPPED))
    return Emulator(run_folder / "int8", *map(carried, dict.fromkeys(sources)))


def draw(rng, name, shape):
    limits = np.iinfo(DTYPES[name])
    return rng.integers(limits.min, limits.max, shape, DTYPES[name], endpoint=True)


def check(emulator, config, m, n, k, *, pair="s8,s8", layout="NT", batch=1, seed=0, **fields):
    """Every element, of operands over the whole range, in any layout."""
    rng, types = np.random.default_rng([m, n, k, seed]), pair.split(",")
    a, b = draw(rng, types[0], (batch, m, k)), draw(rng, types[1], (batch, n, k))
    flipped = [letter == "T" for letter in layout]
    stored = [a.swapaxes(1, 2) if flipped[0] else a, b if flipped[1] else b.swapaxes(1, 2)]
    operands = [
        Operand(name, transposed, x.shape[2], 0, x.shape[1] * x.shape[2])
        for name, transposed, x in zip(types, flipped, stored, strict=True)
    ]
    problem = Problem(batch, batch, m, n, k, *operands, "s32", "s32", **fields)
    arrays = dict(zip("ab", map(np.ascontiguousarray, stored), strict=True))
    got = emulator.run(problem, arrays, implementation="wgmma", config=config, seed=seed)[0]
    expected = a.astype(np.int64) @ b.astype(np.int64).swapaxes(1, 2) * int(problem.alpha)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_configs(kernels, config):
    check(kernels, config, 300, 270, 1000)
    check(kernels, config, 133, 75, 129, layout="NN", batch=2, seed=1)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("config", [COOPERATIVE, SWAPPED])
def test_pairs_of_types(kernels, config, pair):
    check(kernels, config, 140, 100, 272, pair=pair)


@pytest.mark.parametrize("layout", ["NN", "TN", "TT"])
def test_layouts(kernels, layout):
    check(kernels, COOPERATIVE, 140, 100, 200, layout=layout)


def test_split_k_and_factor(kernels):
    check(kernels, f"{COOPERATIVE}_split3", 130, 140, 1300)
    check(kernels, COOPERATIVE, 130, 140, 300, alpha=-3.0)


def test_sums_wrap_around(kernels):
    """As those of int32 do, in a tile's own sums and in those of a cluster."""
    k = 2**17 + 128
    a, b = (np.full((64, k), -128, np.int8) for _ in range(2))
    operand = Operand("s8", False, k), Operand("s8", True, k)
    problem = Problem(1, 1, 64, 64, k, *operand, "s32", "s32")
    for config in (SWAPPED, SPLIT):
        arrays = {"a": a, "b": b}
        got = kernels.run(problem, arrays, implementation="wgmma", config=config)[0]
        assert (got.reshape(64, 64) == np.int64(k * 2**14).astype(np.int32)).all()


# --- functions ----------------------------------------------------------------------------------

M, N, K = 264, 200, 1000


def quantized(acc, row, column):
    """To float by scales of rows and columns, and rounded to integers again."""
    y = acc.astype(jnp.float32) * row * column
    return y.astype(jnp.bfloat16), jnp.clip(acc // 64, -127, 127).astype(jnp.int8)


@functools.cache
def function_call():
    """The problem, and the function's operands."""
    rng = np.random.default_rng(7)
    operands = [2.0 ** rng.integers(-2, 3, x).astype(np.float32) for x in ((M, 1), (1, N))]
    problem, used = function_of_product(quantized, operands, (M, N, K), DTYPES["s8"], np.int32)
    return problem, operands, used


def function_kernel(config):
    function = function_call()[0].epilogue.function
    own = kernel(config, epilogue=f"Function<tcgemm::elementwise::{function.name}>")
    return dataclasses.replace(own, definitions=function.definitions)


def check_function(emulator, config, seed=0):
    problem, operands, used = function_call()
    rng = np.random.default_rng(seed)
    a, b = draw(rng, "s8", (M, K)), draw(rng, "s8", (N, K))
    arrays = {"a": a, "b": b}
    arrays |= {f"function operand {i}": operands[number] for i, number in enumerate(used)}
    found = emulator.run(problem, arrays, implementation="wgmma", config=config, seed=seed)
    acc = a.astype(np.int32) @ b.astype(np.int32).T
    expected = quantized(jnp.asarray(acc), *operands)
    for x, number in zip(found, problem.epilogue.function.order, strict=True):
        np.testing.assert_array_equal(x.reshape(M, N), expected[number])


@pytest.mark.parametrize("config", [COOPERATIVE, SWAPPED])
def test_functions(kernels, config):
    check_function(kernels, config)


@pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())
@pytest.mark.parametrize("config", [SWAPPED, SPLIT])
def test_compiles_without_faults(config):
    """Registers of float32 that hold integers make no multiplications wait for each other."""
    assert nvrtc.compile_kernel(kernel(config)).faults == ()


def test_refusals(kernels):
    x = np.zeros((64, 64), np.int8)
    operands = Operand("s8", False, 64), Operand("s8", True, 64)
    problem = Problem(1, 1, 64, 64, 64, *operands, "f32", "s32")
    with pytest.raises(RuntimeError, match=re.escape("the output of s8 inputs must be s32")):
        kernels.run(problem, {"a": x, "b": x}, implementation="wgmma", config=COOPERATIVE)


SUM, FUNCTION = "kernels/wgmma/cluster_sum.cuh", "epilogue/function.cuh"
MISTAKES = [
    Mistake(SUM, "added_up_as_floats", "T::kIsInteger", "false", SPLIT),
    Mistake(SUM, "one_of_a_pair", case=SPLIT),
    Mistake(
        FUNCTION,
        "bits_taken_for_a_number",
        "static_cast<Sum>(__float_as_uint(held))",
        "held",
        COOPERATIVE,
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(kernels, mistake, tmp_path):
    config, is_function = mistake.case, mistake.file == FUNCTION
    source = carried(function_kernel(config) if is_function else kernel(config))
    wrong = Emulator(tmp_path, source, mistakes=[mistake], like=kernels)
    with pytest.raises((AssertionError, RuntimeError)):
        check_function(wrong, config) if is_function else check(wrong, config, 300, 270, 1000)
