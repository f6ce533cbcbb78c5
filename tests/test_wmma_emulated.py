"""Kernels of WMMA, emulated: bare products, and functions of sums of every type."""

import dataclasses
import functools

import emulated
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import Emulator, carried
from emulated_checks import (
    BF16,
    CASE,
    TF32,
    Types,
    check,
    function_of_product,
    integers,
    kernels_of,
)
from gpu.gemm_call import make_inputs
from kernel_instances import wmma_tiled
from mistakes import Mistake

from jax_tcgemm.problem.dtypes import DTYPES

pytestmark = pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason())

F16, S8 = Types("f16", "f16", "f16"), Types("s8", "s32", "s32")
BARE = [
    ("wmma_naive", "m16n16k16", BF16, "NN", "all_odd"),
    ("wmma_naive", "m8n32k16", F16, "TT", "alpha_beta_odd_batch"),
    ("wmma_naive", "m8n8k4", Types("f64", "f64", "f64"), "NT", "all_odd"),
    ("wmma_tiled", "m16n16k16_64x64x32", BF16, "NN", "several_tiles"),
    ("wmma_tiled", "m16n16k16_64x64x32", BF16, "TT", "all_odd"),
    ("wmma_tiled", "m16n16k16_128x128x32", F16, "NT", "several_tiles"),
    ("wmma_tiled", "m32n8k16_128x128x32", BF16, "TN", "all_odd"),
    ("wmma_tiled", "m8n32k16_128x128x32_satf", F16, "NN", "several_tiles"),
    ("wmma_tiled", "m16n16k16_128x128x64", S8, "NN", "alpha_beta_odd_batch"),
    ("wmma_tiled", "m16n16k8_128x128x16", TF32, "TN", "several_tiles"),
    ("wmma_tiled", "m8n8k4_64x128x16", Types("f64", "f64", "f64"), "NN", "several_tiles"),
]
# What the function's kernel is compiled for, and of what products.
NT, M16N16K16 = "OneLayout<false, true>", "16, 16, 16"
FUNCTIONS = {
    "m16n16k16_128x128x32": (
        *(M16N16K16, "128, 128, 32, 64, 64, 4, 2", NT),
        *(("__half", "__half"), "f16", "f16"),
    ),
    "m16n16k16_128x128x64": (
        *(M16N16K16, "128, 128, 64, 64, 64, 4, 2", "AnyLayout"),
        *(("int8_t", "int32_t"), "s8", "s32"),
    ),
    "m16n16k8_128x128x16": (
        *("16, 16, 8", "128, 128, 16, 64, 64, 4, 2", NT),
        *(("float", "float"), "f32", "tf32"),
    ),
}
M, N, K = 200, 136, 120


def scaled(acc, row, column):
    """Two results, and what is left of rows and of columns."""
    y = acc.astype(jnp.float32) * row + column
    return y.astype(jnp.bfloat16), (acc // 4).astype(jnp.int8), y.sum(-1), acc.max(-2)


@functools.cache
def function_call(config):
    """The problem, and the function's operands."""
    *_, dtype, compute = FUNCTIONS[config]
    rng = np.random.default_rng(7)
    operands = [integers(rng, shape, "f32") for shape in ((M, 1), (1, N))]
    sums = np.int32 if compute == "s32" else np.float32
    problem, used = function_of_product(scaled, operands, (M, N, K), DTYPES[dtype], sums)
    return dataclasses.replace(problem, compute=compute), operands, used


def function_kernel(config):
    shape, tile, layout, types, *_ = FUNCTIONS[config]
    function = function_call(config)[0].epilogue.function
    own = wmma_tiled(shape, tile, function.name, layout, types)
    return dataclasses.replace(own, definitions=function.definitions)


@pytest.fixture(scope="session")
def kernels(run_folder):
    """Those of all tests here."""
    bare = [
        kernel
        for implementation, config, types, layout, label in BARE
        for kernel in kernels_of(
            implementation, config, make_inputs(types, layout, CASE[label]).problem
        )
    ]
    own = map(carried, map(function_kernel, FUNCTIONS))
    sources = dict.fromkeys([*bare, *own])
    return Emulator(run_folder / "wmma", *sources, families=("wmma",), sanitize=True)


@pytest.mark.parametrize(("implementation", "config", "types", "layout", "label"), BARE)
def test_bare(kernels, implementation, config, types, layout, label):
    how = {"implementation": implementation, "config": config, "seed": len(label)}
    check(kernels, types, layout, CASE[label], **how)


def check_function(emulator, config):
    """All results, in several orders of threads."""
    problem, operands, used = function_call(config)
    rng = np.random.default_rng(0)
    a, b = (integers(rng, shape, FUNCTIONS[config][-2]) for shape in ((M, K), (N, K)))
    arrays = {"a": a, "b": b}
    arrays |= {f"function operand {i}": operands[number] for i, number in enumerate(used)}
    acc = a.astype(np.int32) @ b.astype(np.int32).T
    sums = acc if problem.compute == "s32" else acc.astype(np.float32)
    expected = scaled(jnp.asarray(sums), *operands)
    function = problem.epilogue.function
    for seed in range(3):
        how = {"implementation": "wmma_tiled", "config": config, "seed": seed}
        found = emulator.run(problem, arrays, **how)
        for x, number, result in zip(found, function.order, function.results, strict=True):
            own = np.asarray(expected[number])
            if result.over:
                # What is left of eights, or sixteens, side by side.
                x = x.reshape(-1, N).max(0) if own.shape == (N,) else x.reshape(M, -1).sum(1)
            np.testing.assert_array_equal(x.reshape(own.shape), own)


@pytest.mark.parametrize("config", FUNCTIONS)
def test_functions(kernels, config):
    check_function(kernels, config)


MISTAKES = [
    Mistake(
        "kernels/wmma/tiled_kernel.cuh",
        "all_warps_in_one_place",
        "+ warp_idx * Rows::kElements",
        "",
        "m16n16k16_128x128x32",
    ),
    Mistake(
        "kernels/wmma/store.cuh", "half_of_what_is_staged", "[e]", "[0]", "m16n16k16_128x128x32"
    ),
    Mistake(
        "kernels/wmma/operand_tile.cuh", "one_layout_for_all", "!=", "==", "m16n16k16_128x128x64"
    ),
    Mistake(
        "kernels/wmma/store.cuh",
        "padding_that_is_not_there",
        "rows.kLd",
        "Config::kWarpN",
        "m16n16k8_128x128x16",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(kernels, mistake, tmp_path):
    own = carried(function_kernel(mistake.case))
    wrong = Emulator(tmp_path, own, mistakes=[mistake], like=kernels)
    with pytest.raises((AssertionError, RuntimeError), match="not equal|Mismatched"):
        check_function(wrong, mistake.case)
