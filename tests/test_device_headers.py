"""The headers that ship with the package: complete, and without the host."""

import re
from pathlib import Path

from jax_tcgemm import _build

FOLDER = Path(_build.__file__).parent / "include"
CUDA = {"cuda_bf16.h", "cuda_fp16.h", "mma.h"}


def test_kernels_ship():
    shipped = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*kernel.cuh")}
    assert shipped == {"epilogue/function_kernel.cuh"} | {
        f"kernels/{kernel}.cuh"
        for kernel in (
            "batched/kernel",
            "simt/naive_kernel",
            "simt/tiled_kernel",
            "wmma/naive_kernel",
            "wmma/tiled_kernel",
            "wmma/fragment_probe_kernel",
            "mma_sync/kernel",
            "mma_sync/ragged_kernel",
            "packed/kernel",
            "packed/wide_kernel",
            "packed/dequantizing_kernel",
            "packed/order_kernel",
            "packed/weight_kernel",
            "quantize/row_kernel",
            "quantize/tile_kernel",
            "split/kernel",
            "rows/kernel",
            "all_reduce/kernel",
            "pointers/kernel",
            "tensor/transposition_kernel",
            "common/operand_copy_kernel",
            "common/reduction_kernel",
            "common/split_reduction_kernel",
            "wgmma/kernel",
            "wgmma/ragged_kernel",
        )
    }


def test_headers_include_each_other_and_nothing_of_the_host():
    missing = []
    for path in FOLDER.rglob("*"):
        if path.is_dir():
            continue
        text = path.read_text(encoding="utf-8")
        for quote, name in re.findall(r'^#include ([<"])([^>"]+)[>"]', text, re.MULTILINE):
            is_shipped = (FOLDER / ("nvrtc" if quote == "<" else "") / name).is_file()
            if not is_shipped and name not in CUDA:
                missing.append(f"{path.relative_to(FOLDER)}: {name}")
    assert not missing
