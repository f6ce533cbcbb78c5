"""Estimated time of wgmma configs, from the problem and the device.

A persistent grid of one CTA per SM (or of as many clusters as fit) walks the output tiles:

    time = launch + first loads + max~(compute, memory) + split-K reduction + copies of operands

where max~ is a norm, slightly more than the larger of the two. `compute` is the number of waves of
tiles, times the time of one tile's k-tiles: that of the tensor cores or of loads from L2, whichever
is slower. `memory` is the HBM traffic. The constants in `Calibration` were fitted to measured times
of 966 problems; docs/tuning.md has the accuracy and limits of the model.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jax_tcgemm.problem.epilogue import BARE
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.cost_model import library_cost
from jax_tcgemm.selection.cost_model.calibration import H200, Calibration
from jax_tcgemm.selection.cost_model.config_table import Configs, num_warpgroups, parse
from jax_tcgemm.selection.cost_model.epilogue_functions import function_us, waiting_us
from jax_tcgemm.selection.cost_model.grid import Walk, walk_of
from jax_tcgemm.selection.cost_model.mainloop import copied_operands, loads_of, mainloop_us, norm


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
    configs = parse(names)
    kernel = _kernel_us(problem, num_sms, configs, calibration)
    cublaslt = _cublaslt_us(problem, num_sms, configs, calibration, kernel)
    return Prediction(
        (kernel + _copy_us(problem, configs, calibration))[configs.places],
        cublaslt,
        library_cost.xla_us(problem, num_sms, calibration.libraries, cublaslt),
    )


def _cublaslt_us(p: Problem, num_sms: int, x: Configs, c: Calibration, kernel: np.ndarray) -> float:
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


def _kernel_us(p: Problem, num_sms: int, x: Configs, c: Calibration) -> np.ndarray:
    walk, loads = walk_of(p, num_sms, x), loads_of(p, x, c)
    compute = _compute_us(p, x, c, walk, mainloop_us(p, x, c, walk, loads))
    starts = c.launch_us + c.cluster_us * (x.cluster_m * x.cluster_n > 1)
    starts = starts + c.cluster_k_us * (x.cluster_k > 1)
    starts = starts + 128 * loads.loaded / 1024 / c.fill_kib_per_us
    product = starts + norm(compute, _memory_us(p, x, c, walk), c.overlap)
    return walk.launches * product + walk.is_summed * _reduction_us(p, x, c, walk)


def _compute_us(
    p: Problem, x: Configs, c: Calibration, walk: Walk, mainloop: np.ndarray
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
        elements = x.tile_m * x.tile_n / num_warpgroups(x)
        spills = walk.in_kernel & (elements > 128 * 128)
        mainloop = mainloop + spills * elements / 1024 * c.function_spilled_us
        fused = x.tile_m * x.tile_n / groups / 1024 * function_us(p, x, c)
        fused = walk.in_kernel * (fused + x.ping_pong * waiting_us(p, x, c))
        epilogue = epilogue + fused
        exchanged = norm(mainloop, fused, c.function_exchange)
    in_turn = np.ceil(walk.waves / 2) * (mainloop + epilogue)
    alternating = walk.waves * (mainloop + exchanged) / 2 + epilogue
    alternating = np.maximum(alternating, in_turn)
    return np.where(x.ping_pong, alternating, walk.waves * (mainloop + epilogue))


def _memory_us(p: Problem, x: Configs, c: Calibration, walk: Walk) -> np.ndarray:
    """Estimate the time of one launch's HBM traffic."""
    accumulators = max(p.batch, 1) * p.m * p.n * p.num_b
    stored = np.where(walk.is_summed, accumulators / walk.launches * 4, _other_bytes(p))
    # Segments of rows of D: as wide as a tile, or with swap_ab as the 64 rows of an instruction.
    pieces = max(p.batch, 1) * p.m * np.ceil(p.n / np.where(x.swapped, 64, x.tile_n))
    stored = stored + walk.is_unaligned(p) * pieces * c.unaligned_piece_bytes
    return (p.a_bytes + p.b_bytes / walk.launches + stored) / c.hbm_bytes_per_us


def _reduction_us(p: Problem, x: Configs, c: Calibration, walk: Walk) -> np.ndarray:
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


def _copy_us(p: Problem, x: Configs, c: Calibration) -> np.ndarray:
    """Estimate the launch that copies operands; 0 without copies."""
    copied_a, copied_b = copied_operands(p, x)
    if p.symmetric:  # Both operands are one array, copied once where both are copied.
        copied_b = copied_b & ~copied_a
    copied_bytes = copied_a * p.a_bytes + copied_b * p.b_bytes
    return (copied_bytes > 0) * c.copy_us + 2 * copied_bytes / c.copy_bytes_per_us
