"""Estimated time of a tile's main loop: loads, MMAs, and promotion."""

from typing import NamedTuple

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection.cost_model.calibration import Calibration
from jax_tcgemm.selection.cost_model.config_table import Configs, num_warpgroups
from jax_tcgemm.selection.cost_model.coverage import has_8_bits, is_f8
from jax_tcgemm.selection.cost_model.grid import Walk, sides_of


class _Loads(NamedTuple):
    """Loads of A and B that a CTA issues for one k-tile, in rows of 128 bytes."""

    rows_m: np.ndarray
    rows_n: np.ndarray
    loaded: np.ndarray  # all rows; those that take two lines are weighted by `straddling`
    cut: np.ndarray  # rows that start inside a 32-byte sector
    cut_arrival: np.ndarray  # such rows that arrive at the CTA, multicast from other CTAs included


def loads_of(p: Problem, x: Configs, c: Calibration) -> _Loads:
    """Return the loads of each config's CTAs for one k-tile."""
    copied_a, copied_b = copied_operands(p, x)
    rows_m, rows_n = x.tile_m / x.cluster_n, x.tile_n / x.cluster_m
    # The TF32 instruction's B is K-major, after a copy if necessary.
    is_16bit = DTYPES[p.a.dtype].itemsize == 2
    n_major = is_16bit & np.where(x.swapped, p.a.transposed, not p.b.transposed)
    rows_n = rows_n + n_major * (-x.tile_n % 64) / x.cluster_m * c.padding_weight
    # Most tiles of an N-major B start inside a line if their width is no multiple of a line.
    off_line = n_major & (x.tile_n % 64 != 0)
    rows_a, rows_b = np.where(x.swapped, (rows_n, rows_m), (rows_m, rows_n))
    on_line_a = (copied_a | _starts_at(p.a, 128)) & ~(x.swapped & off_line)
    on_line_b = (copied_b | _starts_at(p.b, 128)) & ~(~x.swapped & off_line)
    loaded = rows_a * np.where(on_line_a, 1, c.straddling)
    loaded = loaded + rows_b * np.where(on_line_b, 1, c.straddling)
    tile_a, tile_b = np.where(x.swapped, (x.tile_n, x.tile_m), (x.tile_m, x.tile_n))
    is_cut_a, is_cut_b = ~(copied_a | _starts_at(p.a, 32)), ~(copied_b | _starts_at(p.b, 32))
    cut = rows_a * is_cut_a + rows_b * is_cut_b
    return _Loads(rows_m, rows_n, loaded, cut, tile_a * is_cut_a + tile_b * is_cut_b)


def mainloop_us(p: Problem, x: Configs, c: Calibration, walk: Walk, loads: _Loads) -> np.ndarray:
    """Estimate the main loop of one tile: its k-tiles, of 128 bytes along K each."""
    blocks = _num_column_blocks(p, x)
    columns = x.tile_n / blocks
    pairs = blocks * norm(columns / 2, (columns + 64) * c.shared_clocks_per_row, c.stage_overlap)
    overhead = np.where(x.ping_pong, *c.overhead_clocks)
    multiply = x.tile_m / 64 * 4 * pairs + overhead + _promotion_clocks(p, x, c)
    k_bytes = p.k * DTYPES[p.a.dtype].itemsize
    k_blocks = np.ceil(np.ceil(k_bytes / 128) / x.splits / x.cluster_k)
    tma = loads.cut * c.cut_clocks + _outside(p, x, walk, loads, k_blocks) * c.outside_clocks
    tma = norm(tma, loads.cut_arrival * c.cut_arrival_clocks, c.stage_overlap)
    alone, in_clusters, side_by_side = c.l2_bytes_per_clock
    is_single = x.cluster_m * x.cluster_n * x.cluster_k == 1
    together = np.where(is_single, side_by_side, in_clusters)
    load = 128 * loads.loaded * norm(1 / alone, walk.busy / together, 4)
    arrival = 128 * (x.tile_m + x.tile_n) / c.arriving_bytes_per_clock
    load = norm(norm(load, arrival, 4), tma, 4)
    k_block = np.maximum(norm(multiply, load, c.stage_overlap), c.least_clocks)
    return k_blocks * k_block / c.clocks_per_us + x.ping_pong * c.handover_us


def _promotes(p: Problem) -> bool:
    return p.compute == "f32_promoted" or (is_f8(p) and p.compute == "f32")


def _num_column_blocks(p: Problem, x: Configs) -> np.ndarray | int:
    """Return the number of column blocks in which a warpgroup multiplies a tile.

    A is read once for each block. promoted_parts() in csrc/kernels/wgmma/geometry.h has the same
    rule; taller tiles are divided along their rows instead.
    """
    if not _promotes(p):
        return 1
    groups = num_warpgroups(x)
    most = np.where(groups == 3, 112, 128)
    return np.where((x.tile_m == 64 * groups) & (x.tile_n > most), 2, 1)


def _promotion_clocks(p: Problem, x: Configs, c: Calibration) -> np.ndarray | int:
    """Estimate the clocks of promoted accumulation for one k-tile that are not hidden.

    With ping-pong, one warpgroup multiplies at a time, so that nothing hides promotion; cooperative
    warpgroups partly hide each other's. Where the columns of a tile do not share one block scale, a
    scale is read for each accumulator.
    """
    if not _promotes(p):
        return 0
    groups = num_warpgroups(x)
    clocks = np.take(c.promotion_clocks, groups - 1)
    if p.scales:
        rows_a, rows_b = (scales.rows for scales in p.scales)
        is_whole = (x.tile_n % 128 == 0) | (128 % x.tile_n == 0)
        is_read = ~is_whole | (np.where(x.swapped, rows_a, rows_b) % 128 != 0)
        clocks = clocks + np.take(c.scaled_clocks, groups - 1)
        clocks = clocks + is_read * np.take(c.scale_read_clocks, groups - 1)
    return clocks * x.tile_n / 2 * x.tile_m / groups / 64


def _outside(p: Problem, x: Configs, walk: Walk, loads: _Loads, k_blocks: np.ndarray) -> np.ndarray:
    """Return the average rows of 128 bytes that a CTA loads from outside the operands per k-tile.

    The last tiles overlap their neighbors instead where D is at least as large as a tile, TMA
    stores D, the kernel runs no epilogue, and there are enough k-tiles (kWorthOverlap in
    csrc/kernels/wgmma/launch.cc).
    """
    m, n = sides_of(p, x)
    overlap = ~walk.in_kernel & (k_blocks >= 5) & (p.n * walk.stored_bytes(p) % 16 == 0)
    share = ~overlap / np.maximum(walk.waves, 1)  # fraction of tiles that reach past D
    outside_m = np.where(m < x.tile_m, x.tile_m - m, share * (-m % x.tile_m))
    outside_n = np.where(n < walk.d_tile_n, walk.d_tile_n - n, share * (-n % walk.d_tile_n))
    outside = np.minimum(outside_m, loads.rows_m)
    return outside + np.minimum(outside_n * x.tile_n / walk.d_tile_n, loads.rows_n)


def copied_operands(p: Problem, x: Configs) -> tuple[np.ndarray, np.ndarray]:
    """Return whether A and B are copied: if TMA cannot read them, or they must be transposed.

    The TF32 instruction reads B K-major; its A, with swap_ab the problem's B, comes from registers
    where it is M-major. The 8-bit instructions read both operands K-major.
    """
    is_tf32, is_8_bit = p.compute == "tf32", has_8_bits(p)
    transposed_a = (is_tf32 or is_8_bit) and p.a.transposed
    transposed_b = (is_tf32 or is_8_bit) and not p.b.transposed
    copied_a = (x.swapped | is_8_bit) & transposed_a | (not p.a.is_aligned)
    copied_b = (~x.swapped | is_8_bit) & transposed_b | (not p.b.is_aligned)
    return copied_a, copied_b


def _starts_at(operand: Operand, num_bytes: int) -> bool:
    """Return whether every row is aligned to `num_bytes` in a buffer that is."""
    return operand.ld * DTYPES[operand.dtype].itemsize % num_bytes == 0


def norm(x, y, order):
    """Return the norm of two overlapping times: between the larger one and their sum."""
    if order == 4:  # by squares, in a tenth of the time of powers
        x, y = x * x, y * y
        return np.sqrt(np.sqrt(x * x + y * y))
    return (x**order + y**order) ** (1 / order)
