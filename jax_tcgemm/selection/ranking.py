"""Order of the candidates for a problem: measured choices, estimated times, and preferences."""

import functools
from collections.abc import Sequence

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.selection import implementations, rules, tables, tiny_batches, xla_forms
from jax_tcgemm.selection.cost_model import coverage, library_cost, prediction
from jax_tcgemm.selection.cost_model.calibration import calibration_of
from jax_tcgemm.selection.cost_model.loops import loop_launch_us
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.implementations import (
    IMPLEMENTATIONS_OF,
    PLATFORM_OF,
    XLA,
    XLA_CONFIG,
    AnyProblem,
    Candidate,
    configs_of,
)
from jax_tcgemm.system import modules

# Factors on estimated times that are wrong more often than the others.
_DOUBT = {"cublaslt": 1.1, "mma_sync": 1.3, tiny_batches.IMPLEMENTATION: 1.1}


def candidates(problem: AnyProblem, device: Device) -> tuple[Candidate, ...]:
    """Return every implementation and config of the device's platform, each with its obstacle."""
    found = [
        candidate
        for implementation in IMPLEMENTATIONS_OF[problem.kind]
        if PLATFORM_OF.get(implementation) == device.platform
        for candidate in implementations.considered(
            implementation, configs_of(implementation, problem.kind) or ("",), problem, device
        )
    ]
    return (*found, *_of_xla(problem, device))


def _of_xla(problem: AnyProblem, device: Device) -> tuple[Candidate, ...]:
    """Return XLA's candidates: its own product, and on CUDA the other forms of a GEMM."""
    if problem.kind != "gemm" or device.platform != "cuda":
        return (Candidate(XLA, XLA_CONFIG, ""),)
    others = (x for x in xla_forms.FORMS if not xla_forms.obstacle(x, problem))
    forms = dict.fromkeys((xla_forms.own(problem), *others))
    return tuple(Candidate(XLA, form, "") for form in forms)


def ranked(
    problem: Problem, device: Device, implementation: str | None = None
) -> list[tuple[Candidate, float | None]]:
    """Return the candidates that can run a problem, the preferred one first.

    Args:
      problem: the problem.
      device: the device that runs the problem.
      implementation: the only implementation to rank; None ranks all.

    Returns:
      Candidates, each with its estimated time in microseconds, or None without an estimate.
    """
    considered = candidates(problem, device)
    if implementation is not None:
        considered = tuple(c for c in considered if c.implementation == implementation)
    return _rank(problem, device, considered)


@functools.lru_cache(maxsize=4096)
def predicted(problem: Problem, device: Device) -> tuple[str, float] | None:
    """Return the fastest implementation by the cost model and its estimated time in microseconds.

    Tables of measured choices are ignored, so that times of two problems are comparable.

    Returns:
      The implementation and its time; None where the preferred candidate has no estimate.
    """
    order = ranked(problem, device)
    if not order or order[0][1] is None:
        return None
    return order[0][0].implementation, order[0][1]


@functools.lru_cache(maxsize=4096)
def gain_of_converting(problem: Problem, device: Device, loops: int, num_bytes: int) -> str:
    """Return why XLA is faster for operands that our kernels need converted or permuted first.

    XLA converts or permutes operands while its product loads them.

    Args:
      problem: the product of the converted operands.
      device: the device that runs the problem.
      loops: number of arrays that are converted or permuted, each by an XLA loop of its own.
      num_bytes: bytes that these loops read and write in total.

    Returns:
      The reason; "" where XLA is not known to be faster.
    """
    timed = [(c.implementation == XLA, us) for c, us in ranked(problem, device) if us is not None]
    ours, theirs = ([us for is_xla, us in timed if is_xla == wanted] for wanted in (False, True))
    if tables.is_tuned(problem, device.key) or not (ours and theirs):
        return ""
    calibration = calibration_of(device.name)
    launch_us = loop_launch_us(num_bytes / loops, calibration)
    converting = loops * launch_us + num_bytes / calibration.hbm_bytes_per_us
    own, xla = min(ours) + converting, min(theirs)
    if own < xla:
        return ""
    return (
        f"the cost model predicts {own:.4g} us with conversions of operands, {xla:.4g} us for XLA"
    )


def predicted_us(problem: Problem, device: Device) -> float | None:
    """Return the time of `predicted` in microseconds, without the implementation."""
    found = predicted(problem, device)
    return found and found[1]


def broadcast_form(
    problem: AnyProblem, device: Device, considered: Sequence[Candidate]
) -> Candidate | None:
    """Return XLA's form "broadcast" where it is faster than any GEMM kernel; or None."""
    if problem.kind != "gemm" or device.platform != "cuda":
        return None
    if not xla_forms.broadcast_pays(problem):
        return None
    timed = _tiny_batch(problem, device, considered)
    bytes_per_us = calibration_of(device.name).hbm_bytes_per_us
    if timed is not None and timed[1] < xla_forms.broadcast_us(problem, bytes_per_us):
        return None
    return Candidate(XLA, xla_forms.BROADCAST, "")


def _tiny_batch(
    problem: Problem, device: Device, considered: Sequence[Candidate]
) -> tuple[Candidate, float] | None:
    """Return the kernel for batches of tiny matrices and its estimated time; or None."""
    bytes_per_us = calibration_of(device.name).hbm_bytes_per_us
    found = tiny_batches.candidate_of(problem, considered, bytes_per_us)
    if found is None:
        return None
    return found, tiny_batches.estimated_us(problem, device.num_sms, bytes_per_us)


def measured(
    problem: AnyProblem, device: Device, considered: Sequence[Candidate]
) -> tuple[Candidate, str] | None:
    """Return the measured choice that this build has and that can run the problem; or None."""
    if problem.kind != "gemm":
        return None
    for entry, source in tables.lookup(problem, device.key):
        candidate = Candidate(entry.implementation, entry.config, "")
        if candidate in considered and entry.abi == implementations.abi_of(entry.implementation):
            return candidate, f"measured, {entry.us:.4g} us ({source})"
    return None


def preferred(problem: AnyProblem, device: Device, considered) -> tuple[Candidate, str] | None:
    """Return the first candidate by `_rank`, and the reason; None when no candidate can run."""
    order = _rank(problem, device, considered)
    if not order:
        return None
    best, us = order[0]
    if us is not None:
        why = f"the cost model predicts {us:.4g} us"
        if len(order) > 1 and order[1][1] is not None:
            why += f", {order[1][1]:.4g} us for {order[1][0].name}"
        return best, why
    refused = dict.fromkeys(c.implementation for c in considered if c.reason)
    refused = [name for name in refused if name != best.implementation]
    if best.implementation == XLA:
        missing = modules.reason("cuda") if device.platform == "cuda" else ""
        others = any(candidate.implementation != XLA for candidate, _ in order)
        unknown = "nothing is known to be faster than XLA's program"
        why = missing or (unknown if others else "no other implementation can run this")
    elif refused:
        why = f"first in the order of preference that can run this; {', '.join(refused)} cannot"
    else:
        why = "first in the order of preference"
    return best, why


def _rank(problem: AnyProblem, device: Device, considered) -> list[tuple[Candidate, float | None]]:
    """Return the candidates that can run, best first, each with its estimated time or None.

    For GEMMs on CUDA, candidates with an estimate come first. These are wgmma's configs, cuBLASLt's
    first config, and where their times are modeled, XLA, mma_sync and simt_batched. The others
    follow in the order of `IMPLEMENTATIONS`, and within an implementation in the order of configs.
    """
    runnable = [candidate for candidate in considered if not candidate.reason]
    if problem.kind == "ragged":
        runnable.sort(key=functools.partial(rules.is_of_wrong_width, problem, device.num_sms))
    if problem.kind == "packed":
        return _rank_packed(problem, device, runnable)
    if problem.kind != "gemm" or device.platform != "cuda":
        return [(candidate, None) for candidate in runnable]
    wgmma, rest = [], []
    for candidate in runnable:
        (wgmma if candidate.implementation == "wgmma" else rest).append(candidate)
    calibration = calibration_of(device.name)
    if (small := broadcast_form(problem, device, considered)) is not None and small in rest:
        us = xla_forms.broadcast_us(problem, calibration.hbm_bytes_per_us)
        others = [(candidate, None) for candidate in runnable if candidate != small]
        return [(small, us), *others]
    names = tuple(candidate.config for candidate in wgmma) or configs_of("wgmma")
    tiny = _tiny_batch(problem, device, considered)
    if tiny is not None and (xla_forms.broadcast_pays(problem) or not coverage.models(problem)):
        # Other candidates run a slower loop, or have no estimate.
        return [tiny, *((candidate, None) for candidate in runnable if candidate != tiny[0])]
    if not names or not coverage.knows(names):
        return [(candidate, None) for candidate in runnable]
    if not coverage.models(problem):
        # Nothing is known to be faster than XLA's program.
        runnable.sort(key=lambda candidate: candidate.implementation != XLA)
        return [(candidate, None) for candidate in runnable]
    predicted = prediction.predict(problem, device.num_sms, names, calibration)
    # Other implementations have estimates even where wgmma cannot run the problem.
    known = dict(zip(wgmma, predicted.wgmma.tolist(), strict=True)) if wgmma else {}
    mma_sync = [c for c in rest if c.implementation == "mma_sync"] if wgmma else []
    configs = tuple(candidate.config for candidate in mma_sync)
    us = library_cost.mma_sync_us(problem, device.num_sms, calibration.libraries, configs)
    if us is not None:
        known |= dict(zip(mma_sync, us.tolist(), strict=True))
    # XLA's time is compared where wgmma can run. For one row, XLA is fastest where wgmma cannot.
    if predicted.xla is not None and (wgmma or (problem.m == 1 and problem.batch == 1)):
        known[Candidate(XLA, xla_forms.own(problem), "")] = predicted.xla
    us = library_cost.xla_int8_us(problem, device.num_sms, calibration.libraries)
    if us is not None:
        known.setdefault(Candidate(XLA, xla_forms.of_int8(problem), ""), us)
    if tiny is not None:
        known |= dict([tiny])
    if first := configs_of("cublaslt")[:1]:
        known[Candidate("cublaslt", *first, "")] = predicted.cublaslt
    timed = [(candidate, known[candidate]) for candidate in runnable if candidate in known]
    others = [(candidate, None) for candidate in rest if candidate not in known]
    return sorted(timed, key=cautious_us) + others


def _rank_packed(
    problem: PackedProblem, device: Device, runnable: Sequence[Candidate]
) -> list[tuple[Candidate, float | None]]:
    """Order candidates for weight-only quantization by estimated time, reported for Hopper only."""
    timed = [(rules.packed_us(problem, device.num_sms, each), each) for each in runnable]
    timed.sort(key=lambda pair: pair[0])
    is_known = device.compute_capability == 90
    return [(each, us if is_known and us < rules.UNKNOWN_US else None) for us, each in timed]


def cautious_us(timed: tuple[Candidate, float]) -> float:
    """Return an estimated time in microseconds, increased for less reliable estimates."""
    candidate, us = timed
    return us * _DOUBT.get(candidate.implementation, 1.0)
