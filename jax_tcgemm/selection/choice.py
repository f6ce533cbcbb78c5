"""Which implementation and config runs a problem: one component, one printable result.

In this order: what was asked for by name; what a table of measurements says (tables.py); what the
cost model predicts to be fastest (cost_model.py), where wgmma can run; a fixed preference.
Everything is decided while a program is traced or lowered, from the problem, the device and tables
that are read once in a process, so the same program always makes the same choices.
"""

import contextlib
import dataclasses
import functools
import operator
import os
import platform as host_platform
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.selection import cost_model, tables
from jax_tcgemm.system import modules
from jax_tcgemm.system.switches import print_choice, switch

XLA = "xla"
_XLA_CONFIG = "default"

# The names of the CUDA implementations, in the order in which selection prefers them. Known
# without the _cuda module too, so that a build without it tells a missing one from a misspelt one.
_CUDA_PREFERENCE = (
    "wgmma",
    "cublaslt",
    "mma_sync",
    "wmma_tiled",
    "simt_tiled",
    "wmma_naive",
    "simt_naive",
)
IMPLEMENTATIONS = (*_CUDA_PREFERENCE, "host", XLA)
_PLATFORM_OF = dict.fromkeys((*_CUDA_PREFERENCE, "simt"), "cuda") | {"host": "cpu"}

AnyProblem = Problem | RaggedProblem | RowsProblem

# Those that know each kind of problem (`Problem.kind`).
IMPLEMENTATIONS_OF = {
    "gemm": IMPLEMENTATIONS,
    "ragged": ("wgmma", "mma_sync", "host", XLA),
    "rows": ("simt", "host", XLA),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What a choice may depend on. `assumed` when no such device is present here."""

    platform: str
    compute_capability: int = 0
    num_sms: int = 0
    shared_memory_bytes: int = 0
    assumed: bool = False
    name: str = ""

    @property
    def key(self) -> tables.DeviceKey:
        """What tables of measured choices know it by."""
        return tables.DeviceKey(self.platform, self.name, self.compute_capability, self.num_sms)

    def query(self) -> dict:
        """What the modules' reject() and workspace_bytes() take."""
        return {
            "compute_capability": self.compute_capability,
            "num_sms": self.num_sms,
            "shared_memory_bytes": self.shared_memory_bytes,
        }


# Lowering for CUDA where there is no GPU aims at an H200.
ASSUMED_GPU = Device("cuda", 90, 132, 232448, assumed=True, name="NVIDIA H200")


class Candidate(NamedTuple):
    """An implementation with a config; `reason` says why it cannot run, "" when it can."""

    implementation: str
    config: str
    reason: str

    @property
    def name(self) -> str:
        """`implementation/config`."""
        return f"{self.implementation}/{self.config}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a problem, why, and what was considered."""

    implementation: str
    config: str
    why: str
    workspace_bytes: int = 0
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        return f"{self.implementation}/{self.config}: {self.why}"


def target_device(platform: str) -> Device:
    """The device that a program lowered for `platform` will run on: the first or an assumed one."""
    if platform == "cpu":
        return Device(platform, name=_cpu_name())
    if platform != "cuda":
        return Device(platform)
    properties = modules.cuda_device()
    if properties is None:
        return ASSUMED_GPU
    fields = ("compute_capability", "num_sms", "shared_memory_bytes")
    return Device("cuda", *(properties[field] for field in fields), name=properties["name"])


@functools.cache
def _cpu_name() -> str:
    """The processor and how many of its threads this process may use."""
    name = host_platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} x {len(os.sched_getaffinity(0))}"


class Source(NamedTuple):
    """Where an implementation and its config are asked for by name, in the words of messages."""

    implementation: str
    config: str
    why: str
    remedy: str


ARGUMENTS = Source("implementation", "config", "asked for by name", "None selects one that can")
SWITCHES = Source(
    "TCGEMM_IMPLEMENTATION",
    "TCGEMM_CONFIG",
    "forced by TCGEMM_IMPLEMENTATION",
    "unset the variable",
)


def check_names(
    op: str,
    implementation: str | None,
    config: str | None,
    kind: str = "gemm",
    source: Source = ARGUMENTS,
) -> None:
    """Raises ValueError for an unknown implementation or config, TypeError for a non-string.

    `kind` says of what problems, as `Problem.kind` does.
    """
    for what, value in ((source.implementation, implementation), (source.config, config)):
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"{op}: {what} must be a string or None, got {what}={value!r}; "
                "see jax_tcgemm.info()"
            )
    if implementation is None:
        if config is not None:
            raise ValueError(
                f"{op}: {source.config} must come with an implementation, got "
                f"{source.config}={config!r}; give {source.implementation}, too"
            )
        return
    if implementation not in IMPLEMENTATIONS_OF[kind]:
        raise ValueError(
            f"{op}: {source.implementation} must be one of {', '.join(IMPLEMENTATIONS_OF[kind])}, "
            f"got {source.implementation}={implementation!r}; {source.remedy}"
        )
    configs = _configs(implementation, kind)
    if config is not None and configs and config not in configs:
        raise ValueError(
            f"{op}: {source.config} must be one of {listed(configs, ', ')} for {implementation}, "
            f"got {source.config}={config!r}; {source.remedy}"
        )


def listed(configs: Sequence[str], separator: str) -> str:
    """Configs as text; those that are others with K split are not said one by one."""
    names = [config.partition("_split") for config in configs]
    bases = separator.join(dict.fromkeys(base for base, _, _ in names))
    parts = dict.fromkeys(splits for _, _, splits in names if splits)
    return f"{bases}, each also with _split and {', '.join(parts)}" if parts else bases


def candidates(problem: AnyProblem, device: Device) -> tuple[Candidate, ...]:
    """Every implementation and config of the device's platform, and what stops it if anything."""
    found = [
        candidate
        for implementation in IMPLEMENTATIONS_OF[problem.kind]
        if _PLATFORM_OF.get(implementation) == device.platform
        for candidate in _considered(
            implementation, _configs(implementation, problem.kind) or ("",), problem, device
        )
    ]
    return (*found, Candidate(XLA, _XLA_CONFIG, ""))


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


def select(
    op: str,
    problem: AnyProblem | str,
    device: Device,
    implementation: str | None = None,
    config: str | None = None,
) -> Choice:
    """Chooses what runs a problem.

    Args:
      op: the public function, for messages.
      problem: the problem; or a phrase saying why the product is not one, which leaves XLA.
      device: where it runs.
      implementation: a name to force; None selects.
      config: a config of that implementation to force; None selects.

    Returns:
      The choice.

    Raises:
      ValueError: when what was forced, here or by a debug switch, cannot run the problem.
    """
    source = ARGUMENTS
    if implementation is None and (isinstance(problem, str) or problem.kind != "rows"):
        implementation, config = switch("TCGEMM_IMPLEMENTATION"), switch("TCGEMM_CONFIG")
        if implementation or config:
            source = SWITCHES
            check_names(op, implementation, config, source=source)
    if isinstance(problem, str):
        choice = _without_problem(op, problem, implementation, source)
    elif implementation is None:
        if problem.kind == "gemm":
            for found in tuple(_collectors):
                found.append((problem, device))
        choice = _best(problem, device, tables.revision())
    else:
        choice = _forced(op, problem, device, implementation, config, source)
    print_choice(op, problem, choice)
    return choice


def _without_problem(op, reason, implementation, source) -> Choice:
    if implementation in (None, XLA):
        return Choice(XLA, _XLA_CONFIG, reason if implementation is None else source.why)
    raise ValueError(_refusal(op, source, implementation, reason))


def _refusal(op, source: Source, name, reason) -> str:
    return (
        f"{op}: {source.implementation} must be able to run the product, got "
        f"{source.implementation}={name!r}: {name} cannot run this: {reason}; {source.remedy}"
    )


def _forced(op, problem, device, implementation, config, source) -> Choice:
    if implementation == XLA:
        return Choice(XLA, _XLA_CONFIG, source.why)
    if implementation not in (able := IMPLEMENTATIONS_OF[problem.kind]):
        raise ValueError(_refusal(op, source, implementation, f"only {', '.join(able)} can"))
    configs = (config,) if config is not None else _configs(implementation, problem.kind) or ("",)
    considered = _considered(implementation, configs, problem, device)
    best = _tuned(problem, device, considered) or _modelled(problem, device, considered)
    if best is not None:
        # One config is no choice, and needs no reason but who asked for it.
        why = source.why if len(considered) == 1 else f"{source.why}; {best[1]}"
        return _chosen(best[0], why, problem, device, considered)
    raise ValueError(_refusal(op, source, implementation, considered[0].reason))


@functools.lru_cache(maxsize=4096)
def _best(problem: AnyProblem, device: Device, revision: int) -> Choice:
    del revision  # What tables say depends on it.
    considered = candidates(problem, device)
    if (tuned := _tuned(problem, device, considered)) is not None:
        best, why = tuned
    elif device.platform == "cpu":
        best, why = _cpu_rule(problem, considered)
    else:
        best, why = _modelled(problem, device, considered)
    return _chosen(best, why, problem, device, considered)


def forget() -> None:
    """Forgets past choices, after the modules or the rules have changed under them."""
    _best.cache_clear()
    _configs.cache_clear()


def _tuned(problem: AnyProblem, device: Device, considered) -> tuple[Candidate, str] | None:
    """What a table says, where what it says exists in this build and can run the problem."""
    if problem.kind != "gemm":
        return None
    for entry, source in tables.lookup(problem, device.key):
        candidate = Candidate(entry.implementation, entry.config, "")
        if candidate in considered and entry.abi == abi_of(entry.implementation):
            return candidate, f"measured, {entry.us:.4g} us ({source})"
    return None


def abi_of(implementation: str) -> int:
    """The ABI number of the module that an implementation is in; 0 for XLA's own dot."""
    return 0 if implementation == XLA else _module(implementation).abi_version


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
        why = missing or "no other implementation can run this"
    elif refused:
        why = f"first in the order of preference that can run this; {', '.join(refused)} cannot"
    else:
        why = "first in the order of preference"
    return best, why


def _rank(problem: AnyProblem, device: Device, considered) -> list[tuple[Candidate, float | None]]:
    """The candidates that can run, best first, each with its predicted time where there is one.

    Those with a prediction, wgmma, cuBLASLt beside it and XLA for one row, come first; on CUDA
    the others follow in the order of _CUDA_PREFERENCE, and within one implementation in the order
    of its configs.
    """
    runnable = [candidate for candidate in considered if not candidate.reason]
    if problem.kind == "ragged":
        runnable.sort(key=functools.partial(_is_of_wrong_width, problem))
    if problem.kind != "gemm":
        return [(candidate, None) for candidate in runnable]
    wgmma, rest = [], []
    for candidate in runnable:
        (wgmma if candidate.implementation == "wgmma" else rest).append(candidate)
    names = tuple(candidate.config for candidate in wgmma)
    if not names or not cost_model.models(problem, names):
        return [(candidate, None) for candidate in runnable]
    predicted = cost_model.predict(problem, device.num_sms, names)
    timed, others = list(zip(wgmma, predicted.wgmma.tolist(), strict=True)), []
    for candidate in rest:
        if candidate.implementation == "cublaslt" and candidate.config == _configs("cublaslt")[0]:
            timed.append((candidate, predicted.cublaslt))
        elif candidate.implementation == XLA and predicted.xla is not None:
            timed.append((candidate, predicted.xla))
        else:
            others.append((candidate, None))
    return sorted(timed, key=operator.itemgetter(1)) + others


def _is_of_wrong_width(problem: RaggedProblem, candidate: Candidate) -> bool:
    """Whether a config of wgmma has tiles of many tokens where groups have few, or the reverse.

    With few, weights pass by once whatever the tile, and narrow ones leave room for more stages.
    """
    few = problem.form == "rows" and problem.tokens <= 32 * problem.groups
    return candidate.implementation == "wgmma" and few != ("x64x64_" in candidate.config)


def _cpu_rule(problem: AnyProblem, considered) -> tuple[Candidate, str]:
    """The CPU's default: XLA's own product, but for what `host` was measured to gain at."""
    *hosts, xla = considered
    if hosts[0].reason:
        return xla, f"host cannot run this: {hosts[0].reason}"
    refused = {host.config for host in hosts if host.reason}
    if problem.kind == "gemm" and {"avx512", "avx2"} <= refused:
        return xla, "host is known beside XLA's own product with AVX2 or AVX-512 only"
    if not _gains_on_host(problem):
        return xla, "host is not known to gain on XLA's own product inside a CPU program"
    return hosts[0], "host is known to gain on XLA's own product inside a CPU program"


def _gains_on_host(problem: AnyProblem) -> bool:
    """Whether `host` took at most about 0.8 of XLA:CPU's time in a loop, with AVX2 and AVX-512.

    A call in a program costs a microsecond or two where XLA would inline the product, and keeps it
    from fusing what follows. So a gain needs work, and something that XLA:CPU does badly: batches
    of products from 4x4x4 to below 8x8x8, a transposed A with few columns of B, a matrix of 16
    bits times a vector, integers whose sums run down the columns of A, complex numbers, and
    groups, of which it multiplies every row by each. uint8 and complex128 follow int8 and
    complex64. csrc/cpu/README.md has figures.
    """
    match problem.kind:
        case "rows":
            return problem.pairs * problem.n >= 2**13
        case "ragged":
            return problem.groups * problem.m * problem.n * problem.k >= 2**18
    m, n, k = problem.m, problem.n, problem.k
    work = m * n * k
    if problem.batch >= 64 and min(m, n, k) >= 4 and work < 2**9:
        return True
    few_columns = problem.a.transposed and m >= 512 and 1 < n <= m // 16
    match problem.a.dtype:
        case "f32":
            return few_columns and work >= 2**16
        case "f16" | "bf16":
            return (few_columns or n == 1) and work >= 2**16
        case "s8" | "u8":
            return problem.a.transposed and n > 1 and work >= 2**20
        case "c64" | "c128":
            return min(m, n) >= 64 and work >= 2**20
    return False


def _chosen(candidate, why, problem, device, considered) -> Choice:
    workspace_bytes = 0
    if candidate.implementation != XLA:
        workspace_bytes = _queries(candidate.implementation, problem.kind).workspace_bytes(
            candidate.implementation, candidate.config, problem.query(), device.query()
        )
    if device.assumed:
        why += "; no GPU here, so an H200 is assumed"
    return Choice(candidate.implementation, candidate.config, why, workspace_bytes, considered)


def _module(implementation: str):
    return getattr(modules, _PLATFORM_OF[implementation])


def _queries(implementation: str, kind: str):
    """What answers for an implementation and a kind of problems (csrc/modules/queries.h)."""
    module = _module(implementation)
    return module if kind == "gemm" else getattr(module, kind, None)


@functools.cache
def _configs(implementation: str, kind: str = "gemm") -> tuple[str, ...]:
    """The configs of an implementation, the default first; empty when it is not in this build."""
    if implementation == XLA:
        return (_XLA_CONFIG,)
    queries = _queries(implementation, kind)
    return tuple(queries.implementations().get(implementation, ())) if queries is not None else ()


def _considered(
    implementation: str, configs: tuple[str, ...], problem: AnyProblem, device: Device
) -> tuple[Candidate, ...]:
    """One config of an implementation, or all, each with the rule that stops it, "" for none."""
    platform, reason = _PLATFORM_OF[implementation], ""
    if platform != device.platform:
        reason = f"it runs on {platform}, not on {device.platform}"
    elif not _configs(implementation, problem.kind):
        reason = modules.reason(platform) or "it is not part of this build"
    elif implementation == "cublaslt":
        reason = modules.cublaslt_reason()
    if reason:
        return tuple(Candidate(implementation, config, reason) for config in configs)
    module = _queries(implementation, problem.kind)
    queries = (problem.query(), device.query())
    if len(configs) == 1:
        reasons = [module.reject(implementation, configs[0], *queries)]
    else:
        reasons = module.rejections(implementation, *queries)
    able = _able(implementation, configs)
    return tuple(
        candidate._replace(reason=why) if why else candidate
        for candidate, why in zip(able, reasons, strict=True)
    )


@functools.lru_cache(maxsize=64)
def _able(implementation: str, configs: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Candidates that nothing stops: the same for every problem, for wgmma has over a thousand."""
    return tuple(Candidate(implementation, config, "") for config in configs)
