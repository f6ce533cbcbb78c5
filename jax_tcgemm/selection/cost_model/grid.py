"""Walk of a wgmma kernel's grid over the tiles of the result."""

from typing import NamedTuple

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.cost_model.config_table import Configs
from jax_tcgemm.selection.cost_model.triangle import triangle_tiles


class Walk(NamedTuple):
    """Walk of a grid over D: where the epilogue runs, and how many waves of tiles there are."""

    is_bare: bool
    in_kernel: np.ndarray  # whether the GEMM kernel runs the epilogue
    is_summed: np.ndarray  # whether a second kernel does, or adds up the slices of split-K
    launches: np.ndarray | int
    d_tile_n: np.ndarray  # columns of D in a tile
    waves: np.ndarray
    busy: np.ndarray  # fraction of SMs that have a tile
    is_half: np.ndarray  # whether tiles above the diagonal of a symmetric D are not computed

    def stored_bytes(self, p: Problem) -> np.ndarray:
        """Return the bytes of an element that the GEMM kernel stores."""
        return np.where(self.is_summed, 4, DTYPES[p.out_dtype].itemsize)

    def is_unaligned(self, p: Problem) -> np.ndarray:
        """Return whether the GEMM kernel stores rows of D that are not 16-byte aligned."""
        return ~self.is_summed & (p.n * DTYPES[p.out_dtype].itemsize % 16 != 0)


def walk_of(p: Problem, num_sms: int, x: Configs) -> Walk:
    """Return the walk of each config's grid over D."""
    # The epilogue runs in the GEMM kernel or in the split-K reduction. In the GEMM kernel, gate and
    # up of a gated GEMM have half of a tile each; with a reduction, they are two launches.
    is_gated = p.num_b == 2
    in_kernel = np.array(p.function is not None) & (x.splits == 1)
    if is_gated:
        in_kernel = in_kernel & (x.tile_n % 128 == 0) & (x.cluster_m == 2)
    is_summed = (x.splits > 1) | ~(in_kernel | p.is_bare)
    launches = np.where(in_kernel, 1, 2) if is_gated else 1
    d_tile_n = np.where(in_kernel, x.tile_n / 2, x.tile_n) if is_gated else x.tile_n

    cluster = x.cluster_m * x.cluster_n * x.cluster_k
    m, n = sides_of(p, x)
    tiles_m = np.ceil(m / (x.tile_m * x.cluster_m))
    tiles_n = np.ceil(n / (d_tile_n * x.cluster_n))
    tiles, is_half = tiles_m * tiles_n, np.array(False)
    if p.symmetric:
        is_half, triangle = _triangle(p, x, is_summed)
        tiles = np.where(is_half, triangle, tiles)
    tiles = tiles * max(p.batch, 1) * x.splits
    # The number of SMs of a GPC need not be a multiple of four. Of 132 SMs, most H200s ran 30
    # clusters of four or 15 of eight at once; one H200 ran 28 of four.
    slots = np.maximum(np.where(cluster > 2, num_sms * 0.91, num_sms) // cluster, 1)
    waves = np.ceil(tiles / slots)
    busy = np.minimum(tiles, slots) * cluster / num_sms
    return Walk(p.is_bare, in_kernel, is_summed, launches, d_tile_n, waves, busy, is_half)


def _triangle(p: Problem, x: Configs, is_summed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each config computes half of a symmetric D, and the number of cluster tiles.

    The rules are those of runs_symmetric() in csrc/kernels/wgmma/wgmma.cc and Tiles in launch.cc.
    """
    rows, columns = x.tile_m * x.cluster_m, x.tile_n * x.cluster_n
    square = np.maximum(rows, columns)
    divides = (square % rows == 0) & (square % columns == 0)
    runs = ~x.swapped & divides & (p.scales is None) & (p.num_b == 1)
    if p.function is not None:
        is_one = len(p.function.results) == 1 and not p.function.results[0].over
        runs = runs & (is_summed | is_one)
    return runs, triangle_tiles(p.m, rows, columns)


def sides_of(p: Problem, x: Configs) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the kernel's result: D, or D^T with swap_ab."""
    return np.where(x.swapped, p.n, p.m), np.where(x.swapped, p.m, p.n)
