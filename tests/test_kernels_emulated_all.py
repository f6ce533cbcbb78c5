"""Every kernel that the emulator of tests/emulator can run, in every config: minutes of work.

Of the combinations of cases, layouts and types it is one in seven, each with an order of events of
its own.
"""

import dataclasses
import itertools
import re

import emulated
import numpy as np
import pytest
from emulated import Emulator
from emulated_checks import CASE, Types, check, check_ragged
from epilogue_call import FORMS, wide
from gpu.gemm_call import CONFIG_CASES, LAYOUTS

from jax_tcgemm.problem import DTYPES

pytestmark = [
    pytest.mark.emulated_all,
    pytest.mark.skipif(bool(emulated.reason()), reason=emulated.reason()),
]


def names(file: str) -> list[str]:
    """The configs that a list of csrc has: X("name", ...)."""
    return re.findall(r'X\("([^"]+)"', (emulated.REPOSITORY / "csrc" / file).read_text())


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32"])
def test_all_of_wgmma(dtype, tmp_path):
    configs = names("kernels/wgmma/config.h")
    layouts = ["00", "10"] if dtype == "tf32" else ["00", "01", "10", "11"]
    all_of_it = Emulator(tmp_path, *(f"kernels/wgmma/instance_{dtype}_{x}.cu" for x in layouts))
    inputs, compute = ("f32", "tf32") if dtype == "tf32" else (dtype, "f32")
    everything = itertools.product(
        [*CONFIG_CASES, CASE["several_tiles"]],
        LAYOUTS,
        ["", "_split3"],
        ["f32", "bf16", "f16"],
        configs,
    )
    for i, (case, layout, split, out, config) in enumerate(everything):
        if i % 7 or (split and re.search("c1x1x[2-9]", config)):
            continue
        how = {"implementation": "wgmma", "config": config + split, "seed": i, "num_sms": 4 + i % 5}
        check(all_of_it, Types(inputs, out, compute), layout, case, **how)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["00", "01", "10", "11"])
def test_all_epilogues_of_wgmma(layout, tmp_path):
    all_of_it = Emulator(tmp_path, f"kernels/wgmma/instance_bf16_{layout}.cu")
    letters = "NT"[layout[0] == "1"] + "TN"[layout[1] == "1"]
    configs = [c for c in names("kernels/wgmma/config.h") if not c.endswith("_t")]
    for i, case in enumerate(FORMS.values()):
        for j, (m, n, k) in enumerate([(40, 72, 64), (130, 264, 100), (67, 45, 29)]):
            case = dataclasses.replace(case, m=m, n=n, k=k, layout=letters, batch=(1, 1 + j % 2))
            arrays = case.draw(np.random.default_rng(i))
            for seed, config in enumerate(configs):
                how = {"implementation": "wgmma", "config": config, "seed": seed + i}
                got = all_of_it.run(case.problem, arrays, **how)
                case.compare([wide(x) for x in got], arrays)


RAGGED_SIZES = {
    "mixed": [1, 0, 17, 64, 63, 129, 300, 2, 255, 0],
    "one_group": [0, 801, 0, 0],
    "none": [0] * 3,
    "more_than_there_are": [100, 0, 200] + [300] * 7,
    "many": [3, 0] * 40,
}


@pytest.mark.parametrize("implementation", ["wgmma", "mma_sync"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_all_ragged(dtype, implementation, tmp_path):
    stem = {"wgmma": "ragged_instance_", "mma_sync": "ragged_"}[implementation]
    found = (emulated.REPOSITORY / "csrc/kernels" / implementation).glob(
        f"{stem}{'tf32' if dtype == 'f32' else dtype}*.cu"
    )
    sources = [str(path.relative_to(emulated.REPOSITORY / "csrc")) for path in found]
    if not sources:
        pytest.skip("does not multiply this dtype")
    all_of_it = Emulator(tmp_path, *sources, families=(implementation,))
    wgmma = names("kernels/wgmma/ragged_config.h")
    for seed, (label, form) in enumerate(
        itertools.product(RAGGED_SIZES, ["NN", "NT", "contraction"])
    ):
        rows = form != "contraction"
        extents = (840, 264, 136) if rows else (136, 264, 840)
        fitting = [config for config in wgmma if config.endswith("_t") == rows]
        for config in ["128x128"] if implementation == "mma_sync" else fitting:
            check_ragged(
                all_of_it,
                "rows" if rows else form,
                RAGGED_SIZES[label],
                *extents,
                transposed=form == "NT",
                dtype=dtype,
                implementation=implementation,
                config=config,
                seed=seed,
            )


@pytest.mark.parametrize("compute_capability", [80, 90])
def test_all_of_mma_sync(compute_capability, tmp_path):
    """Every tile and type, by cp.async and, where there is TMA, by that."""
    folder = emulated.REPOSITORY / "csrc"
    sources = [str(p.relative_to(folder)) for p in folder.glob("kernels/mma_sync/instance_*.cu")]
    how = {"families": ("mma_sync",), "compute_capability": compute_capability}
    all_of_it = Emulator(tmp_path, *sources, **how)
    tiles = ["128x256x{}_w64x64_s3", "128x128x{}_w64x64_s4", "64x64x{}_w32x32_s4"]
    types = [
        "bf16 f32 f32",
        "f16 f16 f32",
        "f16 f16 f16",
        "f32 f32 tf32",
        "s8 s32 s32",
        "u8 s32 s32",
    ]
    everything = itertools.product(CONFIG_CASES, LAYOUTS, ["", "_k2"], tiles, types)
    for i, (case, layout, split, tile, names_of_types) in enumerate(everything):
        if i % 7:
            continue
        x = Types(*names_of_types.split())
        k = (64 if "s4" in tile and "128" in tile else 128) // DTYPES[x.inputs].itemsize
        config = tile.format(k) + split
        check(all_of_it, x, layout, case, implementation="mma_sync", config=config, seed=i)


def test_all_of_simt(tmp_path):
    folder = emulated.REPOSITORY / "csrc"
    sources = [str(p.relative_to(folder)) for p in folder.glob("kernels/simt/*.cu")]
    sources.remove("kernels/simt/launch.cu")
    all_of_it = Emulator(tmp_path, *sources, families=("simt",))
    kernels = [
        ("simt_tiled", "128x64x16", "f32 f32 f32"),
        ("simt_tiled", "128x128x16", "f32 bf16 f32"),
        ("simt_tiled", "64x64x8", "f64 f64 f64"),
        ("simt_tiled", "64x64x8", "c64 c64 f32"),
        ("simt_tiled", "64x64x8", "c128 c128 f64"),
        ("simt_naive", "8x32", "bf16 f32 f32"),
        ("simt_naive", "8x32", "s8 s32 s32"),
    ]
    everything = itertools.product(CONFIG_CASES, LAYOUTS, kernels)
    for seed, (case, layout, (implementation, config, types)) in enumerate(everything):
        how = {"implementation": implementation, "config": config, "seed": seed}
        check(all_of_it, Types(*types.split()), layout, case, **how)
