"""Every kernel that the emulator of tests/emulator can run, in every config: minutes of work.

Of the combinations of cases, layouts and types it is one in seven, each with an order of events of
its own.
"""

import itertools
import re

import emulated
import pytest
from emulated import (
    Emulator,
    mma_sync_ragged_table,
    mma_sync_table,
    wgmma_ragged_table,
    wgmma_table,
)
from emulated_checks import CASE, Types, check, check_ragged, kernels_of
from gpu.gemm_call import CONFIG_CASES, LAYOUTS, make_inputs
from kernel_instances import MMA_SYNC_INSTRUCTIONS, WGMMA_INSTRUCTIONS

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.selection.configs import WgmmaConfig

pytestmark = [
    pytest.mark.emulated_all,
    pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason()),
]


CSRC = emulated.REPOSITORY / "csrc"


def configs(file: str, macro: str) -> list[str]:
    """The names in a list of configs that csrc has: #define macro(X) X("name", ...) ..."""
    text = (CSRC / "kernels" / file).read_text()
    return re.findall(r'X\("([^"]+)"', text.split(f"#define {macro}(X)")[1].split("\n\n")[0])


def build_wgmma(directory, *sources) -> Emulator:
    return Emulator(directory, *sources, families=("wgmma",), sanitize=True)


def wgmma_tables(dtype: str, **how) -> list[emulated.Source]:
    """The kernels of all configs in all layouts."""
    names = configs("wgmma/config.h", "TCGEMM_WGMMA_CONFIGS")
    layouts = WGMMA_INSTRUCTIONS[dtype].layouts
    return [wgmma_table(dtype, layout, *names, **how) for layout in layouts]


MMA_SYNC_TILES = ("128x256", "128x128", "64x64")


def build_mma_sync(directory, compute_capability: int, *sources) -> Emulator:
    how = {"compute_capability": compute_capability, "sanitize": True}
    return Emulator(directory, *sources, families=("mma_sync",), **how)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32"])
def test_wgmma(dtype, tmp_path):
    emulator = build_wgmma(tmp_path, *wgmma_tables(dtype))
    inputs, compute = ("f32", "tf32") if dtype == "tf32" else (dtype, "f32")
    everything = itertools.product(
        [*CONFIG_CASES, CASE["several_tiles"], CASE["odd_overlap"]],
        LAYOUTS,
        ["", "_split3"],
        ["f32", "bf16", "f16"],
        configs("wgmma/config.h", "TCGEMM_WGMMA_CONFIGS"),
    )
    for i, (case, layout, split, out, config) in enumerate(everything):
        if i % 7:
            continue
        how = {"implementation": "wgmma", "config": config + split, "seed": i, "num_sms": 4 + i % 5}
        check(emulator, Types(inputs, out, compute), layout, case, **how)


RAGGED_SIZES = {
    "mixed": [1, 0, 17, 64, 63, 129, 300, 2, 255, 0],
    "one_group": [0, 801, 0, 0],
    "none": [0] * 3,
    "more_than_there_are": [100, 0, 200] + [300] * 7,
    "many": [3, 0] * 40,
}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_wgmma_ragged(dtype, tmp_path):
    emulator = build_wgmma(tmp_path, *(wgmma_ragged_table(dtype, x) for x in ("00", "10", "11")))
    *plain, of_weights = configs("wgmma/config.h", "TCGEMM_WGMMA_RAGGED_CONFIGS")
    everything = itertools.product(RAGGED_SIZES.values(), ["NN", "NT", "contraction"])
    for seed, (sizes, form) in enumerate(everything):
        rows = form != "contraction"
        fitting = [config for config in plain if WgmmaConfig.parse(config).swap_ab == rows]
        for config in [*fitting, *([of_weights] if form == "NN" else [])]:
            how = {"implementation": "wgmma", "config": config, "seed": seed, "dtype": dtype}
            extents = (840, 264, 136) if rows else (136, 264, 840)
            name = "rows" if rows else form
            check_ragged(emulator, name, sizes, *extents, transposed=form == "NT", **how)


@pytest.mark.parametrize("compute_capability", [80, 90])
def test_mma_sync(compute_capability, tmp_path):
    """Every tile and type, by cp.async and, where there is TMA, by that."""
    tables = [mma_sync_table(dtype, *MMA_SYNC_TILES) for dtype in MMA_SYNC_INSTRUCTIONS]
    emulator = build_mma_sync(tmp_path, compute_capability, *tables)
    tiles = ["128x256x{}_w64x64_s3", "128x128x{}_w64x64_s4", "64x64x{}_w32x32_s4"]
    types = ["bf16 f32 f32", "f16 f16 f32", "f16 f16 f16", "f32 f32 tf32"]
    types += ["s8 s32 s32", "u8 s32 s32", "s8,u8 s32 s32", "u8,s8 s32 s32"]
    everything = itertools.product(CONFIG_CASES, LAYOUTS, ["", "_k2"], tiles, types)
    for i, (case, layout, split, tile, words) in enumerate(everything):
        if i % 7:
            continue
        of = Types(*words.split())
        tile_k_bytes = 64 if tile.startswith("128x128") else 128
        config = tile.format(tile_k_bytes // DTYPES[of.a].itemsize) + split
        check(emulator, of, layout, case, implementation="mma_sync", config=config, seed=i)


@pytest.mark.parametrize("compute_capability", [80, 90])
def test_mma_sync_ragged(compute_capability, tmp_path):
    tables = map(mma_sync_ragged_table, ("bf16", "f16", "tf32"))
    emulator = build_mma_sync(tmp_path, compute_capability, *tables)
    everything = itertools.product(
        RAGGED_SIZES.values(), ["rows", "contraction"], ["bf16", "f16", "f32"], [0, 1]
    )
    for seed, (sizes, form, dtype, odd) in enumerate(everything):
        extents = (840, 64 + odd, 72 - odd) if form == "rows" else (72 - odd, 64 + odd, 840)
        how = {"implementation": "mma_sync", "config": "128x128", "seed": seed, "dtype": dtype}
        transposed = form == "rows" and seed % 3 == 0
        check_ragged(emulator, form, sizes, *extents, transposed=transposed, **how)


def check_ladder(directory, family, kernels, one_in):
    """Products by configs and types, one in so many of all cases and layouts."""
    products = [
        (implementation, config, Types(*types.split()), layout, case)
        for i, (case, layout, (implementation, config, types)) in enumerate(
            itertools.product(CONFIG_CASES, LAYOUTS, kernels)
        )
        if i % one_in == 0
    ]
    sources = {
        source: None
        for implementation, config, types, layout, case in products
        for source in kernels_of(implementation, config, make_inputs(types, layout, case).problem)
    }
    emulator = Emulator(directory, *sources, families=(family,), sanitize=True)
    for seed, (implementation, config, types, layout, case) in enumerate(products):
        how = {"implementation": implementation, "config": config, "seed": seed}
        check(emulator, types, layout, case, **how)


def test_simt(tmp_path):
    kernels = [
        ("simt_tiled", "128x64x16", "f32 f32 f32"),
        ("simt_tiled", "128x128x16", "f32 bf16 f32"),
        ("simt_tiled", "64x64x8", "f64 f64 f64"),
        ("simt_tiled", "64x64x8", "c64 c64 f32"),
        ("simt_tiled", "64x64x8", "c128 c128 f64"),
        ("simt_naive", "8x32", "bf16 f32 f32"),
        ("simt_naive", "8x32", "s8 s32 s32"),
    ]
    check_ladder(tmp_path, "simt", kernels, one_in=1)


def test_wmma(tmp_path):
    bf16, f16, s8 = "bf16 bf16 f32", "f16 f16 f16", "s8 s32 s32"
    kernels = [("wmma_naive", "m16n16k8", "f32 f32 tf32"), ("wmma_naive", "m8n8k4", "f64 f64 f64")]
    kernels += [("wmma_tiled", "m16n16k8_128x128x16", "f32 f32 tf32")]
    kernels += [("wmma_tiled", "m8n8k4_64x128x16", "f64 f64 f64")]
    kernels += [("wmma_tiled", "m16n16k16_64x64x32", types) for types in (bf16, "f16 f32 f32")]
    for shape in ("m16n16k16", "m32n8k16", "m8n32k16"):
        kernels += [("wmma_naive", shape, types) for types in (bf16, f16, s8)]
        kernels += [("wmma_naive", f"{shape}_satf", types) for types in (f16, s8)]
        kernels += [("wmma_tiled", f"{shape}_128x128x32", types) for types in (bf16, f16)]
        kernels += [("wmma_tiled", f"{shape}_128x128x32_satf", f16)]
        kernels += [("wmma_tiled", f"{shape}_128x128x64{satf}", s8) for satf in ("", "_satf")]
    check_ladder(tmp_path, "wmma", kernels, one_in=7)
