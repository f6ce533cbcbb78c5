"""Estimated times of kernels other than wgmma: XLA's own GEMM kernel, cuBLASLt's, and mma_sync.

All three have one formula, with rates of their own:

    time = launch + norm(loads, multiplications, memory) + split-K reduction
    loads = waves · k · (rows of a tile · t(A) + columns of a tile · t(B) + t(k))

where t is the time of a CTA for each element that it loads, longer where rows are not 16-byte
aligned. XLA and cuBLASLt choose among kernels with many tiles, so their estimate is the shortest
time over all tiles and split counts. Where rows are aligned, XLA may select cuBLASLt's kernel,
whose time is derived from our own kernels (prediction.py).

The rates were fitted to 800 random products on an H100; docs/tuning.md says what that gives.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import xla_forms
from jax_tcgemm.selection.configs import MmaSyncConfig, parse_or_none
from jax_tcgemm.selection.cost_model.triangle import triangle_tiles


class _Tiles(NamedTuple):
    """Tile shapes that kernels may have, with their number of split-K slices."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    splits: np.ndarray


_EXTENTS = (16, 32, 64, 128, 256)
_ANY = np.array(
    [
        (m, n, 32, splits)
        for m, n, splits in itertools.product(_EXTENTS, _EXTENTS, (1, 2, 4, 8, 16, 32, 64))
        if 2**9 <= m * n <= 2**15
    ],
    float,
)
_ANY_TILES = _Tiles(*_ANY.T)
# The largest M * N for which XLA splits K of batched products.
_MOST_SPLIT_OF_BATCH = 350


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of one library's kernels."""

    launch_us: float
    element_us: tuple[float, float]  # of a CTA for each element loaded: of 16 bits, of 32 bits
    misaligned: tuple[float, float]  # factor on that for rows aligned to 2 bytes, and to 4 or 8
    k_us: float  # of a CTA for each k, besides its loads
    multiply_us: float  # of a CTA for each 16-bit multiply-add; doubled for TF32
    reduction_us: float  # constant part of the split-K reduction
    reduction_bytes_per_us: float  # bandwidth of the split-K reduction
    bytes_per_us: float  # memory bandwidth
    misaligned_bytes_per_us: float  # memory bandwidth of operands that are not 16-byte aligned


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Constants of XLA's kernels, cuBLASLt's for misaligned rows, and mma_sync, on an H200."""

    xla: Rates = Rates(
        launch_us=1.55,
        element_us=(2.49e-5, 7.17e-5),
        misaligned=(4.05, 1.67),
        k_us=0.00332,
        multiply_us=1.03e-6,
        reduction_us=4.14,
        reduction_bytes_per_us=4.43e5,
        bytes_per_us=3.91e6,
        misaligned_bytes_per_us=2.80e6,
    )
    cublaslt: Rates = Rates(
        launch_us=3.43,
        element_us=(2.62e-5, 0.000127),
        misaligned=(7.24, 0.992),
        k_us=0.00207,
        multiply_us=1.12e-6,
        reduction_us=4.28,
        reduction_bytes_per_us=7.86e7,
        bytes_per_us=2.58e6,
        misaligned_bytes_per_us=3.07e6,
    )
    mma_sync: Rates = Rates(
        launch_us=4.59,
        element_us=(2.74e-5, 5.5e-5),
        misaligned=(11.8, 3.95),
        k_us=9.96e-6,
        multiply_us=7.57e-7,
        reduction_us=0.319,
        reduction_bytes_per_us=5.07e6,
        bytes_per_us=2.96e6,
        misaligned_bytes_per_us=3.17e6,
    )
    # Additional time where XLA runs cuBLASLt's kernel.
    xla_cublaslt_us: float = 3.4
    # A D of one row or one column; and one row of 16-bit A by a large B of any alignment.
    xla_vector_us: float = 1.59
    xla_vector_bytes_per_us: float = 2.77e6
    xla_row_us: float = 2.8
    xla_row_bytes_per_us: float = 4.65e6
    xla_tiny_us: float = 4.4  # converting the operands of a tiny 16-bit product

    def with_memory(self, factor: float) -> "Libraries":
        """Return the constants for memory whose bandwidth is `factor` times as high."""
        return _with_memory(self, factor)


def _with_memory(rates, factor: float):
    changed = {}
    for field in dataclasses.fields(rates):
        value = getattr(rates, field.name)
        if isinstance(value, Rates):
            changed[field.name] = _with_memory(value, factor)
        elif "bytes_per_us" in field.name:
            changed[field.name] = value * factor
    return dataclasses.replace(rates, **changed)


H200 = Libraries()


def xla_us(p: Problem, num_sms: int, c: Libraries, cublaslt_us: float) -> float | None:
    """Estimate XLA's own kernel in microseconds, given cuBLASLt's time for the product.

    Returns None for dtypes without a model, for products with an epilogue, and where XLA would copy
    operands.
    """
    is_16bit = _is_16bit(p)
    is_row = p.m == 1 and p.batch == 1 and is_16bit
    is_vector = p.compute == "s32" and 1 in (p.m, p.n)
    is_known = is_16bit or is_vector or _is_tf32(p)
    if not is_known or not p.is_bare or not (p.is_packed or is_row):
        return None
    us = math.inf
    if p.m == 1 or p.n == 1:
        us = c.xla_vector_us + p.bytes / c.xla_vector_bytes_per_us
    if is_vector:
        return us
    if is_row:
        return min(us, c.xla_row_us + p.bytes / c.xla_row_bytes_per_us)
    can_split = p.batch == 1 or p.m * p.n <= _MOST_SPLIT_OF_BATCH
    alignments = _alignment(p.a), _alignment(p.b)
    us = min(us, float(_tiles_us(p, num_sms, c.xla, alignments, _ANY_TILES, can_split).min()))
    if is_16bit and p.k > 1 and p.m * p.n * p.k <= xla_forms.MOST_OF_TINY:
        us += c.xla_tiny_us
    if p.a.is_aligned and p.b.is_aligned:
        us = min(us, cublaslt_us + c.xla_cublaslt_us)
    return us


def xla_int8_us(p: Problem, num_sms: int, c: Libraries) -> float | None:
    """Estimate XLA's kernel for 8-bit integers in the form of `xla_forms.of_int8`, in microseconds.

    The estimate is that of XLA's bfloat16 kernel; tiny products are one loop instead. Returns None
    for other problems.
    """
    if xla_forms.obstacle(xla_forms.BFLOAT16, p):
        return None
    if xla_forms.is_tiny_int8(p):
        return c.xla.launch_us + p.bytes / c.xla.bytes_per_us if p.is_packed else None
    as_bfloat16 = dataclasses.replace(
        p,
        a=dataclasses.replace(p.a, dtype="bf16"),
        b=dataclasses.replace(p.b, dtype="bf16"),
        out_dtype="f32",
        compute="f32",
    )
    # XLA's own kernel converts operands while loading them; cuBLASLt's kernels cannot.
    return xla_us(as_bfloat16, num_sms, c, math.inf)


def cublaslt_misaligned_us(p: Problem, num_sms: int, c: Libraries) -> float:
    """Estimate cuBLASLt in microseconds where rows of A or B are not 16-byte aligned."""
    alignments = (min(_alignment(p.a), _alignment(p.b)),) * 2
    us = _tiles_us(p, num_sms, c.cublaslt, alignments, _ANY_TILES, p.batch == 1)
    return float(us.min())


def mma_sync_us(
    p: Problem, num_sms: int, c: Libraries, configs: tuple[str, ...]
) -> np.ndarray | None:
    """Estimate each of these configs of mma_sync in microseconds; None without a model."""
    tiles = _mma_sync_tiles(configs)
    if tiles is None or not p.is_bare or not (_is_tf32(p) or _is_16bit(p)):
        return None
    alignments = _alignment(p.a), _alignment(p.b)
    return _tiles_us(p, num_sms, c.mma_sync, alignments, tiles, computes_half=p.symmetric)


@functools.lru_cache(maxsize=64)
def _mma_sync_tiles(configs: tuple[str, ...]) -> _Tiles | None:
    parsed = [parse_or_none(config) for config in configs]
    if not parsed or not all(isinstance(x, MmaSyncConfig) for x in parsed):
        return None
    numbers = [(x.tile_m, x.tile_n, x.tile_k, x.num_splits) for x in parsed]
    return _Tiles(*np.array(numbers, float).T)


def _is_tf32(p: Problem) -> bool:
    return p.compute == "tf32"


def _is_16bit(p: Problem) -> bool:
    return p.compute == "f32" and p.a.dtype in ("f16", "bf16")


def _alignment(operand: Operand) -> int:
    """Return the alignment of all rows in bytes, at most 16, in a 16-byte-aligned buffer."""
    if operand.is_aligned:
        return 16
    strides = operand.ld, operand.inner_stride
    return math.gcd(16, *(x * DTYPES[operand.dtype].itemsize for x in strides))


def _tiles_us(
    p: Problem,
    num_sms: int,
    rates: Rates,
    alignments: tuple[int, int],
    tiles: _Tiles,
    can_split: bool = True,
    computes_half: bool = False,
) -> np.ndarray:
    """Estimate the time of each tile shape in microseconds.

    `alignments` are those of A and B in bytes. With `computes_half`, the kernel computes half of a
    symmetric D and mirrors the other half.
    """
    is_32bit = DTYPES[p.a.dtype].itemsize == 4
    of_a, of_b = (
        rates.element_us[is_32bit] * (1 if x == 16 else rates.misaligned[x >= 4])
        for x in alignments
    )
    count = np.ceil(p.m / tiles.m) * np.ceil(p.n / tiles.n)
    if computes_half:
        # The rule of kind_of() in csrc/kernels/mma_sync/mma_sync.cc.
        is_half = p.m > np.maximum(tiles.m, tiles.n)
        count = np.where(is_half, triangle_tiles(p.m, tiles.m, tiles.n), count)
    depth = (
        np.ceil(count * (p.batch * tiles.splits) / num_sms)
        * tiles.k
        * np.ceil(p.k / (tiles.k * tiles.splits))
    )
    loads = depth * (tiles.m * of_a + tiles.n * of_b + rates.k_us)
    products = depth * tiles.m * tiles.n * rates.multiply_us * (1 + is_32bit)
    misaligned = sum(
        num_bytes for x, num_bytes in zip(alignments, (p.a_bytes, p.b_bytes), strict=True) if x < 16
    )
    memory = (p.bytes - misaligned) / rates.bytes_per_us
    memory += misaligned / rates.misaligned_bytes_per_us
    reduction = 8 * p.batch * p.m * p.n * tiles.splits / rates.reduction_bytes_per_us
    reduction = reduction + (rates.reduction_us if can_split else math.inf)
    us = np.cbrt(loads**3 + products**3 + memory**3) + np.where(tiles.splits > 1, reduction, 0)
    return rates.launch_us + us
