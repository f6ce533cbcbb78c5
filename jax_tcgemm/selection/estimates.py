"""Estimated times of a problem by an implementation and config, and by XLA's own product.

Selection compares these times; this module returns them for `explain`.
"""

import functools

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection.cost_model import prediction
from jax_tcgemm.selection.cost_model.calibration import calibration_of
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.implementations import XLA, AnyProblem, Candidate, configs_of
from jax_tcgemm.selection.ranking import ranked


def estimated_us(
    problem: AnyProblem | None, device: Device, implementation: str, config: str
) -> float | None:
    """Return the estimated time of a problem with an implementation and a config.

    Args:
      problem: the problem.
      device: the device that runs the problem.
      implementation: an implementation that can run the problem.
      config: a config of that implementation.

    Returns:
      Microseconds; None where there is no estimate, as for CPUs, grouped products, and GPUs other
      than Hopper's.
    """
    times = _times(problem, device)
    us = times.get(Candidate(implementation, config, ""))
    return _xla_us(problem, device, times) if us is None and implementation == XLA else us


def xla_us(problem: AnyProblem | None, device: Device) -> float | None:
    """Return the estimated time of XLA's own product of a problem without an epilogue.

    XLA may run a kernel of its own or one of cuBLASLt. Copies that XLA would make of operands are
    not counted.

    Args:
      problem: the problem.
      device: the device that runs the problem.

    Returns:
      Microseconds; None where there is no estimate, as with an epilogue.
    """
    return _xla_us(problem, device, _times(problem, device))


def _times(problem: AnyProblem | None, device: Device) -> dict[Candidate, float]:
    """Return the estimated time of each candidate that has an estimate, in microseconds."""
    if problem is None or problem.kind not in ("gemm", "packed") or device.platform != "cuda":
        return {}
    return {candidate: us for candidate, us in ranked(problem, device) if us is not None}


def _xla_us(
    problem: AnyProblem | None, device: Device, times: dict[Candidate, float]
) -> float | None:
    """Return XLA's estimated time: the least of its forms in `times`, or that of cuBLASLt."""
    known = [us for candidate, us in times.items() if candidate.implementation == XLA]
    if known:
        return min(known)
    # Without an estimate for wgmma, the cost model does not cover the device or the problem.
    if not any(candidate.implementation == "wgmma" for candidate in times):
        return None
    return _of_cublaslt(problem, device)


@functools.lru_cache(maxsize=1024)
def _of_cublaslt(problem: Problem, device: Device) -> float | None:
    """Estimate cuBLASLt's kernel in XLA's program, for 16-bit operands with aligned rows."""
    is_16bit = problem.a.dtype in ("f16", "bf16") and problem.compute == "f32"
    if not (is_16bit and problem.is_bare and problem.a.is_aligned and problem.b.is_aligned):
        return None
    calibration = calibration_of(device.name)
    names = configs_of("wgmma")
    found = prediction.predict(problem, device.num_sms, names, calibration)
    return found.cublaslt + calibration.libraries.xla_cublaslt_us
