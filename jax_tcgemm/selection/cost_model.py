"""Estimated time of wgmma configs, from the problem and the device.

A persistent grid of one CTA per SM (or of as many clusters as fit) walks the output tiles:

    time = launch + first loads + max~(compute, memory) + split-K reduction + copies of operands

where max~ is a norm, slightly more than the larger of the two. `compute` is the number of waves of
tiles, times the time of one tile's k-tiles: that of the tensor cores or of loads from L2, whichever
is slower. `memory` is the HBM traffic. The constants in `Calibration` were fitted to measured times
of 966 problems; docs/tuning.md has the accuracy and limits of the model.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES, FLOAT8
from jax_tcgemm.problem.epilogue import BARE
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import library_cost
from jax_tcgemm.selection.configs import Schedule, WgmmaConfig, parse_or_none
from jax_tcgemm.selection.triangle import triangle_tiles


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of an H200; clocks are SM clocks, and rates in bytes per clock are per SM."""

    clocks_per_us: float = 1650.0  # of a busy tensor core, as limited by power and issue
    launch_us: float = 0.682
    fill_kib_per_us: float = 33.1  # of a CTA's first loads, which nothing hides
    cluster_us: float = 0.815  # synchronized start and end of a cluster
    cluster_k_us: float = 0.494  # wait for the partial accumulators of other CTAs
    # A k-tile: the MMAs, which read N x K from shared memory for every 64 rows.
    shared_clocks_per_row: float = 0.311
    overhead_clocks: tuple[float, float] = (21.5, 16.1)  # ping-pong, cooperative
    least_clocks: float = 191.0
    # Bandwidth from L2: of one SM alone; of each SM when all load in clusters; and of each when all
    # load without clusters, where neighboring CTAs receive common data together.
    l2_bytes_per_clock: tuple[float, float, float] = (154.0, 62.0, 76.3)
    # Bandwidth into an SM, multicast data included.
    arriving_bytes_per_clock: float = 171.0
    padding_weight: float = 1.79  # weight of loads beyond a tile, which are boxes of their own
    straddling: float = 1.53  # for rows not aligned to a 128-byte line: each load takes two lines
    # Loads that take TMA longer than L2: 128 bytes of a row that starts inside a 32-byte sector,
    # and 128 bytes outside the operand.
    cut_clocks: float = 3.17
    cut_arrival_clocks: float = 1.8  # multicast data included
    outside_clocks: float = 4.93
    # A tile: the time that ping-pong cannot hide, and the epilogue.
    handover_us: float = 0.333
    epilogue_us: float = 0.111
    epilogue_kib_per_us: float = 65.5
    exchange_kib_per_us: float = 47.3  # from other CTAs, where a cluster splits K
    # Time of an epilogue function for 1024 elements of a warpgroup: for each unit of work
    # (`Function.cost`), for each scalar, row vector or column vector that the function reads, and
    # for each 16-bit matrix that it reads or stores.
    function_work_us: float = 0.009
    function_vector_us: float = 0.02
    function_read_us: float = 0.12
    function_stored_us: float = 0.12
    # Where the function's code is too long to be unrolled for each accumulator, one copy runs in a
    # loop over epilogue subtiles. The work is multiplied, since accumulators move to and from that
    # copy's registers. Each row or column vector adds us, since each iteration loads it behind the
    # next tile's operands (fitted to one product, sin 6874x3072x384 on an H200).
    function_turns_work: float = 1.24
    function_turns_us: float = 0.145
    # Time per 1024 elements of each result that the function reduces over columns, and over rows;
    # XLA's final reduction is included.
    function_reduced_us: tuple[float, float] = (0.05, 0.11)
    # Additional time per 1024 elements where N is no multiple of 8, and for each matrix that the
    # function reads then: threads of tiles without swap_ab read and store single elements.
    function_single_us: tuple[float, float] = (1.4, 2.6)
    # Matrices that the function reads: ping-pong threads load them from global memory, and the
    # epilogue waits for them. The rate scales with memory bandwidth.
    function_box_kib_per_us: float = 5.5
    # The unrolled function and the rest of the kernel share an instruction cache of 128 KiB. Code
    # of the function beyond this size is fetched again by each ping-pong epilogue, since the other
    # warpgroup's main loop runs meanwhile; two cooperative warpgroups share the fetched code.
    function_cached_kib: float = 94.0
    function_fetched_kib_per_us: float = 3.9
    # Additional us per 1024 elements where a thread has more than 128 accumulators, so that an
    # epilogue function spills registers: measured for erf with cooperative tiles that spill.
    # Assumed not to be hidden by ping-pong, whose tiles that spill were not measured.
    function_spilled_us: float = 0.12
    # Two ping-pong warpgroups alternate between the tensor cores and the epilogue. One tile of each
    # takes a main loop, plus the norm of this order of a main loop and an epilogue: slightly more
    # than the longer one, since times vary between tiles.
    function_exchange: float = 3.1
    # Time of an XLA loop for a unit of work per 1024 elements.
    loop_work_us: float = 0.0065
    # Clocks of a thread for each accumulator and k-tile of 8-bit floats: for promotion, for scaling
    # it, and for reading the block scale. Each for ping-pong, which hides none of them, for two
    # cooperative warpgroups, and for three. Measured on an H100.
    promotion_clocks: tuple[float, float, float] = (2.5, 1.2, 2.1)
    scaled_clocks: tuple[float, float, float] = (0.3, 1.1, 4.0)
    scale_read_clocks: tuple[float, float, float] = (6.0, 4.0, 4.0)
    # Where rows of D are not 16-byte aligned: additional us of a tile, and additional bytes of each
    # of its rows, whose first and last sectors are written partially.
    unaligned_tile_us: float = 0.77
    unaligned_piece_bytes: float = 250.0
    hbm_bytes_per_us: float = 4.43e6  # memory bandwidth
    overlap: float = 2.53  # order of the norm that combines overlapping times
    stage_overlap: float = 8.82  # order of that norm inside a k-tile
    # The split-K reduction: its launch, and the time for every eight splits; then both with an
    # epilogue function, as measured on an H100.
    reduction_us: tuple[float, float] = (2.02, 0.0863)
    reduction_function_us: tuple[float, float] = (3.4, 0.7)
    reduction_epilogues_per_us: float = 2.2e5  # elements, where the reduction runs an epilogue
    # A launch that copies operands.
    copy_us: float = 2.94
    copy_bytes_per_us: float = 4.03e6
    # cuBLASLt's time, relative to our fastest kernel without operand copies. For TF32 layouts that
    # our kernels would transpose, a constant is added. cuBLASLt splits K of unbatched products
    # only. `libraries` covers rows that are not 16-byte aligned.
    cublaslt: float = 1.03
    cublaslt_tf32: float = 1.06
    cublaslt_tf32_us: float = 2.0
    # cuBLASLt's epilogues: activations, and bytes read or written besides A, B and D.
    cublaslt_activations_per_us: float = 1.8e6
    cublaslt_epilogue_bytes_per_us: float = 5.0e6
    # An XLA loop: launch time for few elements, measured on an H100, and for many elements.
    small_loop_us: float = 1.3
    loop_launch_us: float = 2.8
    loop_launch_bytes: float = 3e6  # traffic from which on a launch takes `loop_launch_us`
    libraries: library_cost.Libraries = library_cost.H200

    def with_memory(self, factor: float) -> "Calibration":
        """Return the constants for memory whose bandwidth is `factor` times as high."""
        rates = ("hbm_bytes_per_us", "copy_bytes_per_us", "cublaslt_epilogue_bytes_per_us")
        rates = (*rates, "function_box_kib_per_us")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) * factor for name in rates},
            libraries=self.libraries.with_memory(factor),
        )


H200 = Calibration()
# An H100 has the SMs of an H200, and 3.35 TB/s of memory bandwidth instead of 4.8.
H100 = H200.with_memory(3.35 / 4.8)


def calibration_of(device: str) -> Calibration:
    """Return the constants of the device with this name; an H200's for other devices."""
    return H100 if device == "NVIDIA H100 80GB HBM3" else H200


# The most instructions of an epilogue function that is unrolled for each element of a thread, as in
# is_at_once() of csrc/kernels/wgmma/function_boxes.cuh. Longer code is a loop over subtiles.
_MOST_AT_ONCE = 8192
_INSTRUCTION_BYTES = 16


@dataclasses.dataclass(frozen=True)
class _Configs:
    """Configs as a table: a row for each config without split-K, a column for each split count.

    Values that depend on the row or the column alone are computed once and broadcast by NumPy.
    """

    tile_m: np.ndarray
    tile_n: np.ndarray
    cluster_m: np.ndarray
    cluster_n: np.ndarray
    cluster_k: np.ndarray
    ping_pong: np.ndarray
    swapped: np.ndarray
    splits: np.ndarray
    places: tuple[np.ndarray, np.ndarray]  # row and column of each config


@functools.cache
def _parse_one(name: str) -> tuple[str, float] | None:
    """Return a config's name without split-K, and its split count; None if not wgmma's."""
    config = parse_or_none(name)
    if not isinstance(config, WgmmaConfig):
        return None
    return config.unsplit, float(config.num_splits)


@functools.lru_cache(maxsize=64)
def _parse(names: tuple[str, ...]) -> _Configs | None:
    found = [_parse_one(name) for name in names]
    if not found or None in found:
        return None
    bases, rows = np.unique([base for base, _ in found], return_inverse=True)
    splits, columns = np.unique([splits for _, splits in found], return_inverse=True)
    configs = [WgmmaConfig.parse(base) for base in bases.tolist()]

    def of_rows(values) -> np.ndarray:
        return np.array(list(values))[:, None]

    return _Configs(
        tile_m=of_rows(float(x.tile_m) for x in configs),
        tile_n=of_rows(float(x.tile_n) for x in configs),
        cluster_m=of_rows(float(x.cluster_m) for x in configs),
        cluster_n=of_rows(float(x.cluster_n) for x in configs),
        cluster_k=of_rows(float(x.cluster_k) for x in configs),
        ping_pong=of_rows(x.schedule is Schedule.PINGPONG for x in configs),
        swapped=of_rows(x.swap_ab for x in configs),
        splits=splits,
        places=(rows, columns),
    )


def knows(names: tuple[str, ...]) -> bool:
    """Return whether all of these names are configs of wgmma, which the model covers."""
    return _parse(names) is not None


def models(problem: Problem) -> bool:
    """Return whether the model covers a problem's dtypes and its shape, which must not be empty."""
    is_16bit = problem.a.dtype in ("f16", "bf16") and problem.compute in ("f32", "f32_promoted")
    is_tf32 = problem.a.dtype == "f32" and problem.compute == "tf32"
    is_real = is_16bit or is_tf32 or _has_8_bits(problem)
    return is_real and problem.bytes > 0 and problem.k > 0


def _has_8_bits(problem: Problem) -> bool:
    """Return whether operands are 8-bit floats or integers, which wgmma reads K-major only."""
    return _is_f8(problem) or problem.compute == "s32"


def _is_f8(problem: Problem) -> bool:
    return DTYPES[problem.a.dtype] in FLOAT8


class Prediction(NamedTuple):
    """Estimated times of one problem, in microseconds."""

    wgmma: np.ndarray  # float64, one for each config, whether or not it can run the problem
    cublaslt: float  # rough: derived from our own kernels without copies and epilogues
    xla: float | None  # XLA's own dot; None without an estimate


def predict(
    problem: Problem, num_sms: int, names: tuple[str, ...], calibration: Calibration = H200
) -> Prediction:
    """Estimate the time of a problem by each config of wgmma, by cuBLASLt and by XLA.

    Args:
      problem: a problem for which `models` is true.
      num_sms: number of SMs of the device.
      names: configs of wgmma.
      calibration: the device's constants.
    """
    configs = _parse(names)
    kernel = _kernel_us(problem, num_sms, configs, calibration)
    cublaslt = _cublaslt_us(problem, num_sms, configs, calibration, kernel)
    return Prediction(
        (kernel + _copy_us(problem, configs, calibration))[configs.places],
        cublaslt,
        library_cost.xla_us(problem, num_sms, calibration.libraries, cublaslt),
    )


def loop_launch_us(num_bytes: float, calibration: Calibration = H200) -> float:
    """Return the launch time of an XLA loop that moves `num_bytes`, in microseconds."""
    share = min(num_bytes / calibration.loop_launch_bytes, 1.0)
    small = calibration.small_loop_us
    return small + share * (calibration.loop_launch_us - small)


def loop_us(
    num_bytes: int,
    elements: int,
    work: int,
    num_sms: int,
    calibration: Calibration = H200,
    *,
    is_launched: bool = True,
) -> float:
    """Estimate the time of XLA's loop for an elementwise function, in microseconds.

    Args:
      num_bytes: bytes that the loop reads and writes.
      elements: elements of each result.
      work: work per element, as in `Function.cost.loop`.
      num_sms: number of SMs of the device.
      calibration: the device's constants.
      is_launched: whether the loop is a kernel of its own, so that its launch counts.
    """
    arithmetic = elements / 1024 * work * calibration.loop_work_us / num_sms
    us = max(num_bytes / calibration.hbm_bytes_per_us, arithmetic)
    return us + (loop_launch_us(num_bytes, calibration) if is_launched else 0.0)


def _cublaslt_us(
    p: Problem, num_sms: int, x: _Configs, c: Calibration, kernel: np.ndarray
) -> float:
    """Estimate cuBLASLt's time from the fastest of our kernels for the product alone.

    `kernel` has the kernels' times for the problem itself, which are reused where it is bare.
    """
    bare = dataclasses.replace(p, alpha=1.0, beta=0.0, epilogue=BARE, symmetric=False)
    if not (p.a.is_aligned and p.b.is_aligned):
        us = library_cost.cublaslt_misaligned_us(bare, num_sms, c.libraries)
    else:
        kernel = kernel if bare == p else _kernel_us(bare, num_sms, x, c)
        times, undivided = kernel[x.places], ((x.cluster_k == 1) & (x.splits == 1))[x.places]
        if p.batch > 1 and undivided.any():
            times = times[undivided]
        if p.compute == "tf32" and p.layout != "NT":
            us = float(times.min()) * c.cublaslt_tf32 + c.cublaslt_tf32_us
        else:
            us = float(times.min()) * c.cublaslt
    library = p.function.library if p.function else "none"
    if "relu" in library or "gelu" in library:
        us += p.batch * p.m * p.n / c.cublaslt_activations_per_us
    return us + (p.bytes - bare.bytes) / c.cublaslt_epilogue_bytes_per_us


def _kernel_us(p: Problem, num_sms: int, x: _Configs, c: Calibration) -> np.ndarray:
    walk, loads = _walk(p, num_sms, x), _loads(p, x, c)
    compute = _compute_us(p, x, c, walk, _mainloop_us(p, x, c, walk, loads))
    starts = c.launch_us + c.cluster_us * (x.cluster_m * x.cluster_n > 1)
    starts = starts + c.cluster_k_us * (x.cluster_k > 1)
    starts = starts + 128 * loads.loaded / 1024 / c.fill_kib_per_us
    product = starts + _norm(compute, _memory_us(p, x, c, walk), c.overlap)
    return walk.launches * product + walk.is_summed * _reduction_us(p, x, c, walk)


class _Walk(NamedTuple):
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


def _walk(p: Problem, num_sms: int, x: _Configs) -> _Walk:
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
    m, n = _sides(p, x)
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
    return _Walk(p.is_bare, in_kernel, is_summed, launches, d_tile_n, waves, busy, is_half)


def _triangle(p: Problem, x: _Configs, is_summed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _sides(p: Problem, x: _Configs) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the kernel's result: D, or D^T with swap_ab."""
    return np.where(x.swapped, p.n, p.m), np.where(x.swapped, p.m, p.n)


class _Loads(NamedTuple):
    """Loads of A and B that a CTA issues for one k-tile, in rows of 128 bytes."""

    rows_m: np.ndarray
    rows_n: np.ndarray
    loaded: np.ndarray  # all rows; those that take two lines are weighted by `straddling`
    cut: np.ndarray  # rows that start inside a 32-byte sector
    cut_arrival: np.ndarray  # such rows that arrive at the CTA, multicast from other CTAs included


def _loads(p: Problem, x: _Configs, c: Calibration) -> _Loads:
    copied_a, copied_b = _copied(p, x)
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


def _mainloop_us(p: Problem, x: _Configs, c: Calibration, walk: _Walk, loads: _Loads) -> np.ndarray:
    """Estimate the main loop of one tile: its k-tiles, of 128 bytes along K each."""
    blocks = _num_column_blocks(p, x)
    columns = x.tile_n / blocks
    pairs = blocks * _norm(columns / 2, (columns + 64) * c.shared_clocks_per_row, c.stage_overlap)
    overhead = np.where(x.ping_pong, *c.overhead_clocks)
    multiply = x.tile_m / 64 * 4 * pairs + overhead + _promotion_clocks(p, x, c)
    k_bytes = p.k * DTYPES[p.a.dtype].itemsize
    k_blocks = np.ceil(np.ceil(k_bytes / 128) / x.splits / x.cluster_k)
    tma = loads.cut * c.cut_clocks + _outside(p, x, walk, loads, k_blocks) * c.outside_clocks
    tma = _norm(tma, loads.cut_arrival * c.cut_arrival_clocks, c.stage_overlap)
    alone, in_clusters, side_by_side = c.l2_bytes_per_clock
    is_single = x.cluster_m * x.cluster_n * x.cluster_k == 1
    together = np.where(is_single, side_by_side, in_clusters)
    load = 128 * loads.loaded * _norm(1 / alone, walk.busy / together, 4)
    arrival = 128 * (x.tile_m + x.tile_n) / c.arriving_bytes_per_clock
    load = _norm(_norm(load, arrival, 4), tma, 4)
    k_block = np.maximum(_norm(multiply, load, c.stage_overlap), c.least_clocks)
    return k_blocks * k_block / c.clocks_per_us + x.ping_pong * c.handover_us


def _promotes(p: Problem) -> bool:
    return p.compute == "f32_promoted" or (_is_f8(p) and p.compute == "f32")


def _groups(x: _Configs) -> np.ndarray:
    """Return the number of warpgroups that multiply one tile."""
    return np.where(x.ping_pong, 1, np.where(x.tile_m == 192, 3, 2))


def _num_column_blocks(p: Problem, x: _Configs) -> np.ndarray | int:
    """Return the number of column blocks in which a warpgroup multiplies a tile.

    A is read once for each block. promoted_parts() in csrc/kernels/wgmma/geometry.h has the same
    rule; taller tiles are divided along their rows instead.
    """
    if not _promotes(p):
        return 1
    groups = _groups(x)
    most = np.where(groups == 3, 112, 128)
    return np.where((x.tile_m == 64 * groups) & (x.tile_n > most), 2, 1)


def _promotion_clocks(p: Problem, x: _Configs, c: Calibration) -> np.ndarray | int:
    """Estimate the clocks of promoted accumulation for one k-tile that are not hidden.

    With ping-pong, one warpgroup multiplies at a time, so that nothing hides promotion; cooperative
    warpgroups partly hide each other's. Where the columns of a tile do not share one block scale, a
    scale is read for each accumulator.
    """
    if not _promotes(p):
        return 0
    groups = _groups(x)
    clocks = np.take(c.promotion_clocks, groups - 1)
    if p.scales:
        rows_a, rows_b = (scales.rows for scales in p.scales)
        is_whole = (x.tile_n % 128 == 0) | (128 % x.tile_n == 0)
        is_read = ~is_whole | (np.where(x.swapped, rows_a, rows_b) % 128 != 0)
        clocks = clocks + np.take(c.scaled_clocks, groups - 1)
        clocks = clocks + is_read * np.take(c.scale_read_clocks, groups - 1)
    return clocks * x.tile_n / 2 * x.tile_m / groups / 64


def _outside(
    p: Problem, x: _Configs, walk: _Walk, loads: _Loads, k_blocks: np.ndarray
) -> np.ndarray:
    """Return the average rows of 128 bytes that a CTA loads from outside the operands per k-tile.

    The last tiles overlap their neighbors instead where D is at least as large as a tile, TMA
    stores D, the kernel runs no epilogue, and there are enough k-tiles (kWorthOverlap in
    csrc/kernels/wgmma/launch.cc).
    """
    m, n = _sides(p, x)
    overlap = ~walk.in_kernel & (k_blocks >= 5) & (p.n * walk.stored_bytes(p) % 16 == 0)
    share = ~overlap / np.maximum(walk.waves, 1)  # fraction of tiles that reach past D
    outside_m = np.where(m < x.tile_m, x.tile_m - m, share * (-m % x.tile_m))
    outside_n = np.where(n < walk.d_tile_n, walk.d_tile_n - n, share * (-n % walk.d_tile_n))
    outside = np.minimum(outside_m, loads.rows_m)
    return outside + np.minimum(outside_n * x.tile_n / walk.d_tile_n, loads.rows_n)


def _compute_us(
    p: Problem, x: _Configs, c: Calibration, walk: _Walk, mainloop: np.ndarray
) -> np.ndarray:
    """Estimate the time for all tiles; ping-pong stores one tile while it multiplies the next."""
    # CTAs of a cluster that split K store a slice each; of narrow tiles, one CTA stores all columns
    # of a warpgroup.
    groups = np.where(x.ping_pong, 1, 2)
    shares = np.where(
        x.tile_n % (16 * x.cluster_k) == 0, x.cluster_k, np.minimum(groups, x.cluster_k)
    )
    # Epilogue subtiles are 128 bytes wide; a last, narrower one counts as a full one. The function
    # of a gated GEMM stores half as many columns as its tile has.
    columns = x.tile_n if p.epilogue.function is None else walk.d_tile_n
    turns = np.ceil(columns / shares * walk.stored_bytes(p) / 128)
    store = x.tile_m * turns * 128 / 1024 / c.epilogue_kib_per_us
    share_kib = x.tile_m * x.tile_n / shares / 1024
    exchange = (x.cluster_k - 1) * share_kib * 4 / c.exchange_kib_per_us
    store = store * np.where(x.ping_pong, 2, 1) * (1 + walk.is_half)
    store = store + walk.is_unaligned(p) * c.unaligned_tile_us
    epilogue = c.epilogue_us + exchange + store
    exchanged = mainloop
    if p.function is not None:
        elements = x.tile_m * x.tile_n / _groups(x)
        spills = walk.in_kernel & (elements > 128 * 128)
        mainloop = mainloop + spills * elements / 1024 * c.function_spilled_us
        fused = x.tile_m * x.tile_n / groups / 1024 * _function_us(p, x, c)
        fused = walk.in_kernel * (fused + x.ping_pong * _waiting_us(p, x, c))
        epilogue = epilogue + fused
        exchanged = _norm(mainloop, fused, c.function_exchange)
    in_turn = np.ceil(walk.waves / 2) * (mainloop + epilogue)
    alternating = walk.waves * (mainloop + exchanged) / 2 + epilogue
    alternating = np.maximum(alternating, in_turn)
    return np.where(x.ping_pong, alternating, walk.waves * (mainloop + epilogue))


def _waiting_us(p: Problem, x: _Configs, c: Calibration) -> np.ndarray:
    """Return the us that a ping-pong epilogue waits for matrices and for uncached code.

    Code is fetched once for 1024 * 16 accumulators, 128 for each thread of a warpgroup.
    """
    us = sum(_matrices(p)) / c.function_box_kib_per_us
    if not _is_long(p):
        code_kib = _code_size(p) * _INSTRUCTION_BYTES / 1024
        fetched_kib = max(code_kib - c.function_cached_kib, 0)
        us += fetched_kib / c.function_fetched_kib_per_us * p.num_b / 16
    return x.tile_m * x.tile_n / p.num_b / 1024 * us


def _memory_us(p: Problem, x: _Configs, c: Calibration, walk: _Walk) -> np.ndarray:
    """Estimate the time of one launch's HBM traffic."""
    accumulators = max(p.batch, 1) * p.m * p.n * p.num_b
    stored = np.where(walk.is_summed, accumulators / walk.launches * 4, _other_bytes(p))
    # Segments of rows of D: as wide as a tile, or with swap_ab as the 64 rows of an instruction.
    pieces = max(p.batch, 1) * p.m * np.ceil(p.n / np.where(x.swapped, 64, x.tile_n))
    stored = stored + walk.is_unaligned(p) * pieces * c.unaligned_piece_bytes
    return (p.a_bytes + p.b_bytes / walk.launches + stored) / c.hbm_bytes_per_us


def _reduction_us(p: Problem, x: _Configs, c: Calibration, walk: _Walk) -> np.ndarray:
    """Estimate the launch that adds up the slices of split-K and runs the epilogue."""
    elements = max(p.batch, 1) * p.m * p.n
    summed_bytes = elements * p.num_b * 4 * x.splits + _other_bytes(p)
    epilogue = 0 if walk.is_bare else elements / c.reduction_epilogues_per_us
    reduction = np.maximum(summed_bytes / c.hbm_bytes_per_us, epilogue)
    start_us, round_us = c.reduction_us if p.function is None else c.reduction_function_us
    return reduction + start_us + round_us * np.ceil(x.splits / 8)


def _other_bytes(p: Problem) -> int:
    """Return the bytes read and written besides A and B."""
    return p.bytes - p.a_bytes - p.b_bytes


def _function_us(p: Problem, x: _Configs, c: Calibration) -> np.ndarray:
    """Estimate the time of a warpgroup's epilogue function for 1024 accumulators."""
    function = p.function
    vectors = sum(strides.along != "kBoth" for _, _, strides in function.reads)
    work = function.cost.work * (c.function_turns_work if _is_long(p) else 1)
    us = c.function_work_us * work + c.function_vector_us * vectors
    for over, reduced_us in zip(("columns", "rows"), c.function_reduced_us, strict=True):
        us += reduced_us * sum(y.over == over for y in function.results)
    moved = c.function_read_us * p.function_read_bytes
    moved += c.function_stored_us * p.function_result_bytes
    if len(p.d_shape) > 3:  # The function stores the result that is interleaved with D's rows.
        moved += c.function_stored_us * math.prod(p.d_shape) / 2 * DTYPES[p.out_dtype].itemsize
    us = us + moved / max(2 * p.batch * p.m * p.n, 1)
    lines = sum(strides.along in ("kM", "kN") for _, _, strides in function.reads)
    us = us + _runs_in_turns(p, x) * lines * c.function_turns_us
    # With a gated GEMM, two accumulators give one element.
    return us / p.num_b + ~x.swapped * _single_elements_us(p, c)


def _runs_in_turns(p: Problem, x: _Configs) -> np.ndarray:
    """Return whether the function is a loop over subtiles, since its unrolled code is too long."""
    elements = x.tile_m * x.tile_n / _groups(x) / 128 / p.num_b
    return elements * p.function.cost.size > _MOST_AT_ONCE


def _code_size(p: Problem) -> float:
    """Return the instructions of a function unrolled for the 128 accumulators of a thread.

    Tiles with 128 accumulators per thread were measured. Tiles with fewer have shorter code, which
    the model does not count as faster.
    """
    return 128 / p.num_b * p.function.cost.size


def _is_long(p: Problem) -> bool:
    """Return whether a function unrolled for 128 accumulators would be too long."""
    return _code_size(p) > _MOST_AT_ONCE


def _single_elements_us(p: Problem, c: Calibration) -> float:
    """Return the additional us per 1024 elements where N is no multiple of 8."""
    if p.n % 8 == 0:
        return 0.0
    stores, matrix = c.function_single_us
    return stores + matrix * len(_matrices(p))


def _matrices(p: Problem) -> list[int]:
    """Return the element size in bytes of each matrix that the function reads."""
    reads = p.function.reads if p.function else ()
    return [itemsize for _, itemsize, strides in reads if strides.along == "kBoth"]


def _copied(p: Problem, x: _Configs) -> tuple[np.ndarray, np.ndarray]:
    """Return whether A and B are copied: if TMA cannot read them, or they must be transposed.

    The TF32 instruction reads B K-major; its A, with swap_ab the problem's B, comes from registers
    where it is M-major. The 8-bit instructions read both operands K-major.
    """
    is_tf32, is_8_bit = p.compute == "tf32", _has_8_bits(p)
    transposed_a = (is_tf32 or is_8_bit) and p.a.transposed
    transposed_b = (is_tf32 or is_8_bit) and not p.b.transposed
    copied_a = (x.swapped | is_8_bit) & transposed_a | (not p.a.is_aligned)
    copied_b = (~x.swapped | is_8_bit) & transposed_b | (not p.b.is_aligned)
    return copied_a, copied_b


def _copy_us(p: Problem, x: _Configs, c: Calibration) -> np.ndarray:
    """Estimate the launch that copies operands; 0 without copies."""
    copied_a, copied_b = _copied(p, x)
    if p.symmetric:  # Both operands are one array, copied once where both are copied.
        copied_b = copied_b & ~copied_a
    copied_bytes = copied_a * p.a_bytes + copied_b * p.b_bytes
    return (copied_bytes > 0) * c.copy_us + 2 * copied_bytes / c.copy_bytes_per_us


def _starts_at(operand: Operand, num_bytes: int) -> bool:
    """Return whether every row is aligned to `num_bytes` in a buffer that is."""
    return operand.ld * DTYPES[operand.dtype].itemsize % num_bytes == 0


def _norm(x, y, order):
    """Return the norm of two overlapping times: between the larger one and their sum."""
    if order == 4:  # by squares, in a tenth of the time of powers
        x, y = x * x, y * y
        return np.sqrt(np.sqrt(x * x + y * y))
    return (x**order + y**order) ** (1 / order)
