"""Peak rates of GPUs, and the lower bound on a problem's time that follows from them."""

import dataclasses

from jax_tcgemm.problem.dtypes import DTYPES, FLOAT8
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.ragged import RaggedProblem


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Data-sheet figures of one GPU: dense, without sparsity, at boost clock.

    Attributes are operations per second for each arithmetic, and `bytes` of device memory per
    second. `s8` also holds for 8-bit floats; `f32` and `f64` are the best of CUDA cores and tensor
    cores.
    """

    name: str
    f16: float
    tf32: float
    s8: float
    f32: float
    f64: float
    bytes: float


# By compute capability; where several GPUs share one, the figures are of the named GPU.
_PEAKS = {
    80: Peaks("A100 80GB", 312e12, 156e12, 624e12, 19.5e12, 19.5e12, 2.04e12),
    86: Peaks("A40", 149.7e12, 74.8e12, 299.3e12, 37.4e12, 0.58e12, 0.696e12),
    89: Peaks("L40S", 362e12, 183e12, 733e12, 91.6e12, 1.43e12, 0.864e12),
    90: Peaks("H200", 989.4e12, 494.7e12, 1978.9e12, 66.9e12, 66.9e12, 4.8e12),
    100: Peaks("B200", 2250e12, 1100e12, 4500e12, 75e12, 37e12, 8e12),
}


def peaks(compute_capability: int) -> Peaks | None:
    """Return the figures for a compute capability; None when they are not known."""
    return _PEAKS.get(compute_capability)


def roofline_seconds(problem: Problem | RaggedProblem, compute_capability: int) -> float | None:
    """Return the roofline time: the longer of arithmetic and memory traffic at peak rates.

    Returns None for CPUs and for GPUs without known figures.
    """
    known = peaks(compute_capability)
    if known is None:
        return None
    arithmetic = {"s32": known.s8, "tf32": known.tf32, "f64": known.f64, "f16": known.f16}
    if DTYPES[problem.in_dtype] in FLOAT8:
        rate = known.s8
    elif problem.compute in arithmetic:
        rate = arithmetic[problem.compute]
    else:
        rate = known.f16 if problem.in_dtype in ("f16", "bf16") else known.f32
    return max(problem.flops / rate, problem.bytes / known.bytes)
