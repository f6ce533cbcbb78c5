"""Which implementation and config runs a problem: one component, one printable result.

In this order: what was asked for by name; what a table of measurements says (tables.py); what the
cost model predicts to be fastest (cost_model.py), where wgmma can run; a fixed preference.
Everything is decided while a program is traced or lowered, from the problem, the device and tables
that are read once in a process, so the same program always makes the same choices.
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
from jax_tcgemm.selection import (
    cost_model,
    implementations,
    library_cost,
    rules,
    tables,
    tiny_batches,
    xla_forms,
)
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
from jax_tcgemm.system import modules
from jax_tcgemm.system.switches import print_choice, switch

# Whose order of sums depends on how many rows there are, or that run few rows only.
_NOT_INVARIANT = (XLA, "cublaslt", tiny_batches.IMPLEMENTATION)
# How much faster a prediction must be that is wrong more often than the others.
_DOUBT = {"cublaslt": 1.1, "mma_sync": 1.3, tiny_batches.IMPLEMENTATION: 1.1}
# The kinds of problems that the debug switches name an implementation for.
_SWITCHED = ("gemm", "ragged")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a problem, why, and what was considered.

    `kernels` are those that a program must bring, see `kernels.program`.
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
    """Every implementation and config of the device's platform, and what stops it if anything."""
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
    """XLA in the forms in which it may be asked for a problem."""
    if problem.kind != "gemm" or device.platform != "cuda":
        return (Candidate(XLA, XLA_CONFIG, ""),)
    others = (x for x in xla_forms.FORMS if not xla_forms.obstacle(x, problem))
    forms = dict.fromkeys((xla_forms.own(problem), *others))
    return tuple(Candidate(XLA, form, "") for form in forms)


def ranked(
    problem: Problem, device: Device, implementation: str | None = None
) -> list[tuple[Candidate, float | None]]:
    """The candidates that can run a problem, the one that should be fastest first.

    Args:
      problem: the problem.
      device: where it runs.
      implementation: only its candidates; None means all.

    Returns:
      Candidates, each with the microseconds that the cost model predicts, None where it cannot.
    """
    considered = candidates(problem, device)
    if implementation is not None:
        considered = tuple(c for c in considered if c.implementation == implementation)
    return _rank(problem, device, considered)


@functools.lru_cache(maxsize=4096)
def predicted(problem: Problem, device: Device) -> tuple[str, float] | None:
    """What the cost model expects to be fastest for a problem, and its microseconds; or None.

    It is not asked what was measured, so that two problems are told apart by one measure.
    """
    order = ranked(problem, device)
    if not order or order[0][1] is None:
        return None
    return order[0][0].implementation, order[0][1]


@functools.lru_cache(maxsize=4096)
def gain_of_converting(problem: Problem, device: Device, loops: int, num_bytes: int) -> str:
    """Why XLA's own product of operands that ours needs converted or permuted first is faster.

    XLA does so as it loads them.

    Args:
      problem: the product of the converted operands.
      device: where it runs.
      loops: how many arrays are converted or permuted, each in a loop of its own.
      num_bytes: what these read and write.

    Returns:
      The reason; "" where it is not known to be faster.
    """
    timed = [(c.implementation == XLA, us) for c, us in ranked(problem, device) if us is not None]
    ours, theirs = ([us for is_xla, us in timed if is_xla == wanted] for wanted in (False, True))
    if tables.is_tuned(problem, device.key) or not (ours and theirs):
        return ""
    calibration = cost_model.calibration_of(device.name)
    launch_us = cost_model.loop_launch_us(num_bytes / loops, calibration)
    converting = loops * launch_us + num_bytes / calibration.hbm_bytes_per_us
    own, xla = min(ours) + converting, min(theirs)
    if own < xla:
        return ""
    return (
        f"the cost model predicts {own:.4g} us with conversions of operands, {xla:.4g} us for XLA"
    )


def predicted_us(problem: Problem, device: Device) -> float | None:
    """The microseconds alone."""
    found = predicted(problem, device)
    return found and found[1]


# Lists of (problem, device), for those who want to know which problems are lowered.
_collectors: list[list[tuple[Problem, Device]]] = []


@contextlib.contextmanager
def collect() -> Iterator[list[tuple[Problem, Device]]]:
    """Gives a list to which every problem is added that is left to us to choose for meanwhile."""
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
    """What this thread chooses meanwhile is for a program that will run."""
    before, _lowering.is_on = _lowering.is_on, True
    try:
        yield
    finally:
        _lowering.is_on = before


# Says what measures a problem that no table knows when it is lowered, and lets a table know; None
# where nothing does.
_measurer: Callable[[], Callable[[Problem, Device], None] | None] = lambda: None  # noqa: E731


def set_measurer(measurer: Callable[[], Callable[[Problem, Device], None] | None]) -> None:
    """Sets what measures problems that are lowered: a function that returns it, or None."""
    global _measurer
    _measurer = measurer


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What this thread chooses meanwhile is for no program: neither collected nor printed."""
    before, _unseen.is_on = _unseen.is_on, True
    try:
        yield
    finally:
        _unseen.is_on = before


def is_unseen() -> bool:
    """Whether this thread is in an `unseen` block."""
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
    """Chooses what runs a problem.

    Args:
      options: options of the call.
      problem: the problem; None where what was asked for is none.
      device: where it runs.
      kind: of the problem, as `Problem.kind` says it, where there is none.
      obstacle: a phrase saying why only XLA can run it; "" where there is a problem and no more.
      nominal: the problem with `options.invariant_rows` rows, where these are not 0.

    Returns:
      The choice.

    Raises:
      ValueError: when what was forced, here or by a debug switch, cannot run the problem.
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
        # Those who measure have no factors of blocks.
        if kind == "gemm" and problem.factors is None and not _unseen.is_on:
            for found in tuple(_collectors):
                found.append((problem, device))
            _measure_unknown(problem, device)
        choice = _best(problem, device, tables.revision())
    if not _unseen.is_on:
        print_choice(op, problem or obstacle, choice)
    return choice


def _own_form(problem: AnyProblem | None, device: Device) -> str:
    """The form in which XLA is asked for a problem where no other one is faster."""
    is_product = problem is not None and problem.kind == "gemm" and device.platform == "cuda"
    return xla_forms.own(problem) if is_product else XLA_CONFIG


def _obstacle_to_form(form: str, problem: AnyProblem | None, obstacle: str) -> str:
    """Why XLA cannot be asked for a problem in a form; "" if it can."""
    if form == XLA_CONFIG:
        return ""
    return obstacle if problem is None else xla_forms.obstacle(form, problem)


def _measure_unknown(problem: Problem, device: Device) -> None:
    """Has a problem measured that no table knows, where that is asked for."""
    # Those who collect problems will measure them.
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
    """Why a product that `accelerate` has found in a program stays XLA's own; "" where it need not.

    XLA chooses layouts for its own products, and fuses with some what is around them, which a call
    ends: more than what shipped tables say that it gains. So a call must gain much: rows do not
    begin on 16 bytes, where XLA's products take two to five times as long; or the user has tuned
    the product. Or half of the result is the other's transpose, which XLA computes, too.
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
    """The implementation and config that debug switches name."""
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
    # One config is no choice, and needs no reason but who asked for it.
    why = source.why if len(considered) == 1 else f"{source.why}; {best[1]}"
    return _chosen(best[0], why, problem, device, considered)


def _batch_invariant(
    options: CallOptions,
    problem: AnyProblem | None,
    nominal: AnyProblem | None,
    device: Device,
    obstacle: str,
) -> Choice:
    """Select what adds up K in one order for any number of rows; XLA stands for an unfused call.

    The order is that of the config selected for `options.invariant_rows` rows; of the configs that
    have it, the fastest for the rows that there are.
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
    raise ValueError(
        f"{options.function}: batch_invariant must be False for what only XLA runs, got "
        f"batch_invariant=True: {obstacle}; the order of its sums depends on how many rows there "
        "are"
    )


@functools.lru_cache(maxsize=4096)
def _of_nominal(problem: AnyProblem, device: Device, revision: int) -> tuple[Candidate | None, str]:
    """What runs as many rows as decide, or None, and why."""
    del revision
    able = [c for c in candidates(problem, device) if c.implementation not in _NOT_INVARIANT]
    best = _tuned(problem, device, able) or _modelled(problem, device, able)
    return best or (None, _obstacle(able))


def _obstacle(considered: Sequence[Candidate]) -> str:
    """Return why none can run: the reason that most of them have, the first one of these."""
    return collections.Counter(candidate.reason for candidate in considered).most_common(1)[0][0]


@functools.lru_cache(maxsize=4096)
def _best(problem: AnyProblem, device: Device, revision: int) -> Choice:
    del revision  # What tables say depends on it.
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
    """XLA by broadcasting, where it is known to be faster than any product; or None."""
    if problem.kind != "gemm" or device.platform != "cuda":
        return None
    if not xla_forms.broadcast_pays(problem):
        return None
    timed = _tiny_batch(problem, device, considered)
    bytes_per_us = cost_model.calibration_of(device.name).hbm_bytes_per_us
    if timed is not None and timed[1] < xla_forms.broadcast_us(problem, bytes_per_us):
        return None
    return Candidate(XLA, xla_forms.BROADCAST, "")


def _tiny_batch(
    problem: Problem, device: Device, considered: Sequence[Candidate]
) -> tuple[Candidate, float] | None:
    """The kernel for batches of tiny matrices and its estimated time; or None."""
    bytes_per_us = cost_model.calibration_of(device.name).hbm_bytes_per_us
    found = tiny_batches.candidate_of(problem, considered, bytes_per_us)
    if found is None:
        return None
    return found, tiny_batches.estimated_us(problem, device.num_sms, bytes_per_us)


def forget() -> None:
    """Forgets past choices, after the modules or the rules have changed under them."""
    _best.cache_clear()
    _of_nominal.cache_clear()
    predicted.cache_clear()
    configs_of.cache_clear()


def _tuned(
    problem: AnyProblem, device: Device, considered: Sequence[Candidate]
) -> tuple[Candidate, str] | None:
    """What a table says, where what it says exists in this build and can run the problem."""
    if problem.kind != "gemm":
        return None
    for entry, source in tables.lookup(problem, device.key):
        candidate = Candidate(entry.implementation, entry.config, "")
        if candidate in considered and entry.abi == implementations.abi_of(entry.implementation):
            return candidate, f"measured, {entry.us:.4g} us ({source})"
    return None


def _modelled(problem: AnyProblem, device: Device, considered) -> tuple[Candidate, str] | None:
    """The first by `_rank` and why it is; None when nothing can run."""
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
    """The candidates that can run, best first, each with its predicted time where there is one.

    Those with a prediction, wgmma and cuBLASLt, XLA, mma_sync and simt_batched beside it, come
    first; on CUDA the others follow in the order of `IMPLEMENTATIONS`, and within one
    implementation in the order of its configs.
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
    calibration = cost_model.calibration_of(device.name)
    if (small := _small(problem, device, considered)) is not None and small in rest:
        us = xla_forms.broadcast_us(problem, calibration.hbm_bytes_per_us)
        others = [(candidate, None) for candidate in runnable if candidate != small]
        return [(small, us), *others]
    names = tuple(candidate.config for candidate in wgmma) or configs_of("wgmma")
    tiny = _tiny_batch(problem, device, considered)
    if tiny is not None and (xla_forms.broadcast_pays(problem) or not cost_model.models(problem)):
        # What else runs it is a loop that is slower, or has no estimate.
        return [tiny, *((candidate, None) for candidate in runnable if candidate != tiny[0])]
    if not names or not cost_model.knows(names):
        return [(candidate, None) for candidate in runnable]
    if not cost_model.models(problem):
        # Nothing is known to be faster than XLA's program.
        runnable.sort(key=lambda candidate: candidate.implementation != XLA)
        return [(candidate, None) for candidate in runnable]
    predicted = cost_model.predict(problem, device.num_sms, names, calibration)
    # Where wgmma cannot run it, the others are timed beside each other all the same.
    known = dict(zip(wgmma, predicted.wgmma.tolist(), strict=True)) if wgmma else {}
    mma_sync = [c for c in rest if c.implementation == "mma_sync"] if wgmma else []
    configs = tuple(candidate.config for candidate in mma_sync)
    us = library_cost.mma_sync_us(problem, device.num_sms, calibration.libraries, configs)
    if us is not None:
        known |= dict(zip(mma_sync, us.tolist(), strict=True))
    # What XLA takes is known beside wgmma; of one row it is the best wherever that is not.
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
    """Order candidates for a packed weight by estimated times, which are known for Hopper."""
    timed = [(rules.packed_us(problem, device.num_sms, each), each) for each in runnable]
    timed.sort(key=lambda pair: pair[0])
    is_known = device.compute_capability == 90
    return [(each, us if is_known and us < rules.UNKNOWN_US else None) for us, each in timed]


def cautious_us(timed: tuple[Candidate, float]) -> float:
    """A predicted time, longer for those that are known less well."""
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
