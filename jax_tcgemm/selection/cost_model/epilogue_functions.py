"""Estimated time of an epilogue function in a wgmma kernel."""

import math

import numpy as np

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.cost_model.calibration import Calibration
from jax_tcgemm.selection.cost_model.config_table import Configs, num_warpgroups

# The most instructions of an epilogue function that is unrolled for each element of a thread, as in
# is_at_once() of csrc/kernels/wgmma/function_boxes.cuh. Longer code is a loop over subtiles.
_MOST_AT_ONCE = 8192
_INSTRUCTION_BYTES = 16


def waiting_us(p: Problem, x: Configs, c: Calibration) -> np.ndarray:
    """Return the us that a ping-pong epilogue waits for matrices and for uncached code.

    Code is fetched once for 1024 * 16 accumulators, 128 for each thread of a warpgroup.
    """
    us = sum(_matrices(p)) / c.function_box_kib_per_us
    if not _is_long(p):
        code_kib = _code_size(p) * _INSTRUCTION_BYTES / 1024
        fetched_kib = max(code_kib - c.function_cached_kib, 0)
        us += fetched_kib / c.function_fetched_kib_per_us * p.num_b / 16
    return x.tile_m * x.tile_n / p.num_b / 1024 * us


def function_us(p: Problem, x: Configs, c: Calibration) -> np.ndarray:
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


def _runs_in_turns(p: Problem, x: Configs) -> np.ndarray:
    """Return whether the function is a loop over subtiles, since its unrolled code is too long."""
    elements = x.tile_m * x.tile_n / num_warpgroups(x) / 128 / p.num_b
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
