"""Selection of the implementation and config that run a problem, as one printable `Choice`.

The first of these that applies decides: an implementation named by the caller; a table of measured
choices (tables.py); the cost model's estimated times (cost_model), where wgmma can run; a fixed
order of preference. Selection happens while a program is traced or lowered, from the problem, the
device and tables that are read once in a process, so one program always gets the same choices.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.call_options import CallOptions, Provenance
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.packed import PackedProblem
from jax_tcgemm.selection import implementations, rules, tables, tiny_batches, xla_forms
from jax_tcgemm.selection.cost_model import coverage, library_cost, prediction
from jax_tcgemm.selection.cost_model.calibration import calibration_of
from jax_tcgemm.selection.cost_model.loops import loop_launch_us
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.implementations import (
    ARGUMENTS,
    IMPLEMENTATIONS_OF,
    PLATFORM_OF,
    SWITCHES,
    XLA,
    XLA_CONFIG,
    AnyProblem,
    Candidate,
    Source,
    check_names,
    configs_of,
    refusal,
)
from jax_tcgemm.system import errors, modules
from jax_tcgemm.system.switches import print_choice, switch

# Not batch-invariant: either the accumulation order depends on the number of rows, or the number of
# rows is limited.
_NOT_INVARIANT = (XLA, "cublaslt", tiny_batches.IMPLEMENTATION)
# Factors on estimated times that are wrong more often than the others.
_DOUBT = {"cublaslt": 1.1, "mma_sync": 1.3, tiny_batches.IMPLEMENTATION: 1.1}
# The kinds of problems that the debug switches name an implementation for.
_SWITCHED = ("gemm", "ragged")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Implementation and config selected for a problem, the reason, and all candidates.

    `kernels` are the kernels that the program must embed, see `kernels.program`.
    """

    implementation: str
    config: str
    why: str
    workspace_bytes: int = 0
    kernels: tuple[Instance, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        return f"{self.implementation}/{self.config}: {self.why}"


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


# Lists of (problem, device) to which `select` adds problems, one for each open `collect` block.
_collectors: list[list[tuple[Problem, Device]]] = []


@contextlib.contextmanager
def collect() -> Iterator[list[tuple[Problem, Device]]]:
    """Collect the problems for which `select` is free to choose, while the block is open."""
    found: list[tuple[Problem, Device]] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        # By identity: two lists of the same problems are equal.
        _collectors[:] = [other for other in _collectors if other is not found]


class _Unseen(threading.local):
    is_on = False


_unseen = _Unseen()


class _Lowering(threading.local):
    is_on = False


_lowering = _Lowering()


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Mark selections of this thread as made for a program that will run."""
    before, _lowering.is_on = _lowering.is_on, True
    try:
        yield
    finally:
        _lowering.is_on = before


# Returns the function that measures a problem missing from every table when the problem is lowered,
# and adds the result to a table; returns None where measuring is off.
_measurer: Callable[[], Callable[[Problem, Device], None] | None] = lambda: None  # noqa: E731


def set_measurer(measurer: Callable[[], Callable[[Problem, Device], None] | None]) -> None:
    """Set the function that returns how to measure lowered problems, or None."""
    global _measurer
    _measurer = measurer


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Neither collect nor print selections of this thread, which belong to no program."""
    before, _unseen.is_on = _unseen.is_on, True
    try:
        yield
    finally:
        _unseen.is_on = before


def is_unseen() -> bool:
    """Return whether this thread is in an `unseen` block."""
    return _unseen.is_on


def select(
    options: CallOptions,
    problem: AnyProblem | None,
    device: Device,
    *,
    kind: str = "gemm",
    obstacle: str = "",
    nominal: AnyProblem | None = None,
) -> Choice:
    """Select the implementation and config that run a problem.

    Args:
      options: options of the call.
      problem: the problem; None where the call cannot be described as one.
      device: the device that runs the problem.
      kind: the kind of problem (`Problem.kind`), used where `problem` is None.
      obstacle: a phrase saying why only XLA can run the call; "" where others may.
      nominal: the problem with `options.invariant_rows` rows, if that is not 0.

    Returns:
      The choice.

    Raises:
      ValueError: when an implementation or config that was forced, by the call or by a debug
        switch, cannot run the problem.
    """
    op, implementation, config = options.function, options.implementation, options.config
    source, kind = ARGUMENTS, problem.kind if problem is not None else kind
    if options.is_unconstrained and kind in _SWITCHED:
        implementation, config = _switches()
        if implementation or config:
            source = SWITCHES
            check_names(op, implementation, config, source=source)
    if options.invariant_rows:
        choice = _batch_invariant(options, problem, nominal, device, obstacle)
    elif implementation == XLA:
        form = config or _own_form(problem, device)
        if reason := _obstacle_to_form(form, problem, obstacle):
            raise refusal(op, kind, f"{XLA}/{form}", reason, source)
        choice = Choice(XLA, form, source.why)
    elif implementation is not None:
        if obstacle:
            raise refusal(op, kind, implementation, obstacle, source)
        choice = _forced(op, problem, device, implementation, config, source)
    elif obstacle:
        choice = Choice(XLA, XLA_CONFIG, obstacle)
    else:
        # Autotuning does not measure problems with block scales.
        if kind == "gemm" and problem.scales is None and not _unseen.is_on:
            for found in tuple(_collectors):
                found.append((problem, device))
            _measure_unknown(problem, device)
        choice = _best(problem, device, tables.revision())
    if not _unseen.is_on:
        print_choice(op, problem or obstacle, choice)
    return choice


def _own_form(problem: AnyProblem | None, device: Device) -> str:
    """Return XLA's default form for a problem, see `xla_forms.own`."""
    is_product = problem is not None and problem.kind == "gemm" and device.platform == "cuda"
    return xla_forms.own(problem) if is_product else XLA_CONFIG


def _obstacle_to_form(form: str, problem: AnyProblem | None, obstacle: str) -> str:
    """Return why XLA cannot compute a problem in a form; "" if it can."""
    if form == XLA_CONFIG:
        return ""
    return obstacle if problem is None else xla_forms.obstacle(form, problem)


def _measure_unknown(problem: Problem, device: Device) -> None:
    """Measure a problem that no table knows, if measuring is on and the problem is lowered."""
    # Callers that collect problems measure these themselves.
    if not _lowering.is_on or _collectors or (measure := _measurer()) is None:
        return
    if _tuned(problem, device, candidates(problem, device)) is None:
        measure(problem, device)


_OBSTACLES = {
    Provenance.DEQUANTIZED: (
        "no kernel takes operands that are quantized so; XLA dequantizes them first"
    ),
    Provenance.DEQUANTIZED_BLOCKS: (
        "scales are of blocks of K, by which XLA multiplies the operands before their product"
    ),
}


def obstacle_of(options: CallOptions) -> str:
    """Return why only XLA runs a product with this provenance; "" where others may."""
    return _OBSTACLES.get(options.provenance, "")


def reason_to_stay(options: CallOptions, problem: Problem, device: Device) -> str:
    """Return why a product that `accelerate` matched falls back to XLA; "" where it need not.

    XLA chooses layouts for its own products and fuses some of them with neighboring operations. A
    custom call prevents both, which costs more than the gains in the shipped tables. So a product
    is replaced only where the gain is large: rows that are not 16-byte aligned, for which XLA's
    products take two to five times as long; a product that the user has tuned; or a symmetric
    result, of which XLA computes both triangles.
    """
    if not options.is_accelerated or device.platform != "cuda" or problem.symmetric:
        return ""
    if tables.is_tuned(problem, device.key) or not (problem.a.is_aligned and problem.b.is_aligned):
        return ""
    return "nothing is known to run it faster than XLA's own product, which the program has"


def is_forced(options: CallOptions) -> bool:
    """Return whether an argument or a debug switch decides what runs a product."""
    return not options.is_unconstrained or any(_switches())


def _switches() -> tuple[str | None, str | None]:
    """Return the implementation and config that debug switches name, or None for each."""
    return switch("TCGEMM_IMPLEMENTATION"), switch("TCGEMM_CONFIG")


def _forced(
    op: str,
    problem: AnyProblem,
    device: Device,
    implementation: str,
    config: str | None,
    source: Source,
) -> Choice:
    kind = problem.kind
    if implementation not in (able := IMPLEMENTATIONS_OF[kind]):
        raise refusal(op, kind, implementation, f"only {', '.join(able)} can", source)
    configs = (config,) if config is not None else configs_of(implementation, kind) or ("",)
    considered = implementations.considered(implementation, configs, problem, device)
    best = _tuned(problem, device, considered) or _modelled(problem, device, considered)
    if best is None:
        raise refusal(op, kind, implementation, _obstacle(considered), source)
    # With a single config, the only reason is who asked for that config.
    why = source.why if len(considered) == 1 else f"{source.why}; {best[1]}"
    return _chosen(best[0], why, problem, device, considered)


def _batch_invariant(
    options: CallOptions,
    problem: AnyProblem | None,
    nominal: AnyProblem | None,
    device: Device,
    obstacle: str,
) -> Choice:
    """Select a config that accumulates over K in one order for any number of rows.

    The order is taken from the config selected for `options.invariant_rows` rows. Of all configs
    with this order, the fastest for the actual rows is selected. Where no config can run a problem
    with an epilogue, XLA is returned: the caller then runs the product and the epilogue unfused.
    """
    if not obstacle:
        best, why = _of_nominal(nominal, device, tables.revision())
        if best is not None:
            considered = implementations.considered_alike(best, problem, device)
            found = _modelled(problem, device, considered)
            if found is not None:
                rows = options.invariant_rows
                order = f"sums in the order of {best.name}, chosen as for {rows} rows: {why}"
                why = order if found[0] == best else f"{found[1]}; {order}"
                return _chosen(found[0], why, problem, device, considered)
            why = _obstacle(considered)
        obstacle = why
        if not problem.is_bare:
            return Choice(XLA, XLA_CONFIG, obstacle)
    raise errors.of_call(
        ValueError,
        options.function,
        f"batch_invariant must be False for what only XLA runs, got "
        f"batch_invariant=True: {obstacle}; the order of its sums depends on how many rows there "
        "are",
    )


@functools.lru_cache(maxsize=4096)
def _of_nominal(problem: AnyProblem, device: Device, revision: int) -> tuple[Candidate | None, str]:
    """Select the config that sets the order of accumulation, or None; and say why."""
    del revision
    able = [c for c in candidates(problem, device) if c.implementation not in _NOT_INVARIANT]
    best = _tuned(problem, device, able) or _modelled(problem, device, able)
    return best or (None, _obstacle(able))


def _obstacle(considered: Sequence[Candidate]) -> str:
    """Return why no candidate can run: the most common reason, on a tie the first one."""
    return collections.Counter(candidate.reason for candidate in considered).most_common(1)[0][0]


@functools.lru_cache(maxsize=4096)
def _best(problem: AnyProblem, device: Device, revision: int) -> Choice:
    del revision  # A cache key only: the result depends on the tables.
    considered = candidates(problem, device)
    if (small := _small(problem, device, considered)) is not None:
        best, why = small, "a batch of tiny matrices, which XLA fuses with what is around it"
    elif (tuned := _tuned(problem, device, considered)) is not None:
        best, why = tuned
    elif device.platform == "cpu":
        best, why = rules.on_cpu(problem, considered)
    elif problem.kind == "blas":
        best, why = rules.of_blas(problem, considered)
    else:
        best, why = _modelled(problem, device, considered)
    return _chosen(best, why, problem, device, considered)


def _small(
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


def forget() -> None:
    """Clear cached choices, after the extension modules or the rules have changed."""
    _best.cache_clear()
    _of_nominal.cache_clear()
    predicted.cache_clear()
    configs_of.cache_clear()


def _tuned(
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


def _modelled(problem: AnyProblem, device: Device, considered) -> tuple[Candidate, str] | None:
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
    if (small := _small(problem, device, considered)) is not None and small in rest:
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


def _chosen(
    candidate: Candidate, why: str, problem: AnyProblem, device: Device, considered
) -> Choice:
    # cuBLAS takes the same calls on every GPU.
    why += device.assumption if problem.kind != "blas" else ""
    return Choice(
        candidate.implementation,
        candidate.config,
        why,
        implementations.workspace_bytes(candidate, problem, device),
        implementations.kernels(candidate, problem, device),
        considered,
    )
