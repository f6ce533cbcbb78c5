"""Contenders of a benchmark: our implementations by name, our own choice, and the peers.

For a product, contenders are any implementation and any peer; for a workload, its own functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench.suites import Case
from jax_tcgemm.bench.workload import Workload

PEERS = ("xla", "cublaslt")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to run one case or workload.

    Attributes:
      name: unique in its case; what records and tables call it.
      asked: the implementation that was asked for; ``"auto"`` leaves the choice to the library. Of
        a workload, the name.
      recorded: whether it gets a record, or only stands in others'.
      ran: the implementation that runs; of a workload every one, with ``+`` between them.
      forced_config: the config that was asked for, or None.
      config: the config that runs; ``""`` where there is none.
      why: the reason for the choice.
      module: the name its device work carries in a profiler trace.
      function: a jitted function of the operands.
      is_part: whether it computes a part of a workload only, and is timed beside it for that.
    """

    name: str
    asked: str
    recorded: bool
    ran: str
    forced_config: str | None
    config: str
    why: str
    module: str
    function: Callable
    is_part: bool = False


@functools.cache
def device_implementations() -> dict[str, list[str]]:
    """Implementations that this machine's default device may run, each with its configs."""
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return {
        entry.name: list(entry.configs)
        for entry in jax_tcgemm.info().implementations
        if entry.available and entry.platform in (platform, "any")
    }


def parse_implementations(text: str) -> list[str]:
    """Reads ``--impl``: names, ``auto``, or ``all`` that this device may run, comma-separated.

    Raises:
      ValueError: for a name that is none of these.
    """
    known = device_implementations()
    names: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "all":
            names.extend(n for n in known if n != "xla")
        elif name == "auto" or name in known:
            names.append(name)
        else:
            raise ValueError(
                f"bench: impl must be auto, all or one of {', '.join(known)} on this device, got "
                f"impl={name!r}; python -m jax_tcgemm info says why another cannot run"
            )
    return list(dict.fromkeys(names))


def parse_peers(text: str) -> list[str]:
    """Reads ``--peers``; a peer that this machine lacks is left out.

    Raises:
      ValueError: for a name that is no peer.
    """
    names = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for name in names:
        if name not in PEERS:
            raise ValueError(
                f"bench: peers must be among {', '.join(PEERS)}, got peers={name!r}; "
                "leave the others out"
            )
    known = device_implementations()
    return [name for name in names if name in known]


def parse_configs(implementation: str, text: str | None) -> list[str | None]:
    """Reads ``--config`` for one implementation: names, ``all``, or None for its own choice."""
    if text is None or implementation in ("auto", "xla"):
        return [None]
    if text == "all":
        return list(device_implementations()[implementation])
    return [part.strip() for part in text.split(",")]


def check_configs(implementations: Sequence[str], text: str | None) -> None:
    """Raises ValueError where ``--config`` names what none of the implementations has."""
    forced = [name for name in implementations if name not in ("auto", "xla")]
    if text is not None and not forced:
        raise ValueError(
            f"bench: config must come with an implementation that has configs, got config={text!r} "
            f"and impl={','.join(implementations)!r}; name one with --impl"
        )
    known = [config for name in forced for config in device_implementations()[name]]
    for config in parse_configs(forced[0], text) if forced else ():
        if config is not None and config not in known:
            raise ValueError(
                f"bench: config must be one of {selection.listed(known, ', ')} of "
                f"{', '.join(forced)}, got config={config!r}; all takes each"
            )


def build(
    case: Case, asked: str, config: str | None, module: str, recorded: bool = True
) -> Contender:
    """Makes a contender; nothing runs yet.

    Raises:
      ValueError: when the implementation or config cannot run the case, saying why.
      TypeError: when it does not know the dtype.
    """
    preferred = case.out_type if case.out_type != case.element_type else None
    kwargs = {"precision": case.precision, "preferred_element_type": preferred}
    if asked == "xla":
        product = lax.dot_general
    else:
        product = jax_tcgemm.dot_general
        kwargs["implementation"] = None if asked == "auto" else asked
        kwargs["config"] = config

    def function(a, b):
        return product(a, b, case.dimension_numbers, **kwargs)

    function.__name__ = function.__qualname__ = module
    ran, chosen, why = asked, config or "", "asked for by name"
    if asked != "xla":
        (call,) = jax_tcgemm.explain(function, *case.operands)
        ran, chosen, why = call.implementation, call.config, call.why
    name = asked if config is None else f"{asked}/{config}"
    return Contender(
        name, asked, recorded, ran, config, chosen, why, f"jit_{module}", jax.jit(function)
    )


def plan(
    case: Case | Workload,
    implementations: Sequence[str],
    peers: Sequence[str],
    configs: str | None,
) -> tuple[list[Contender], dict[str, str]]:
    """Every contender that can run a case, peers last, and why the others cannot.

    A workload says its own contenders.
    """
    if isinstance(case, Workload):
        return _plan_workload(case)
    asked = [(name, c) for name in implementations for c in parse_configs(name, configs)]
    asked += [(peer, None) for peer in peers if (peer, None) not in asked]
    contenders, refused = [], {}
    for index, (name, config) in enumerate(asked):
        try:
            contenders.append(
                build(case, name, config, f"tcgemm_bench_{index}", name in implementations)
            )
        except (ValueError, TypeError) as error:
            refused[name if config is None else f"{name}/{config}"] = str(error)
    return contenders, refused


def _plan_workload(workload: Workload) -> tuple[list[Contender], dict[str, str]]:
    contenders, refused = [], {}
    functions = [*workload.ours.items(), *workload.peers.items(), *workload.parts.items()]
    for index, (name, function) in enumerate(functions):
        try:
            contenders.append(_build_workload(workload, name, function, f"tcgemm_bench_{index}"))
        except (ValueError, TypeError) as error:
            refused[name] = str(error)
    return contenders, refused


def _build_workload(workload: Workload, name: str, function: Callable, module: str) -> Contender:
    def named(*operands):
        return function(*operands)

    named.__name__ = named.__qualname__ = module
    calls = jax_tcgemm.explain(named, *workload.operands)

    def distinct(values):
        return "+".join(dict.fromkeys(values))

    return Contender(
        name,
        asked=name,
        recorded=name in workload.ours,
        ran=distinct(call.implementation for call in calls) or "xla",
        forced_config=None,
        config=distinct(call.config for call in calls),
        why="; ".join(dict.fromkeys(call.why for call in calls)),
        module=f"jit_{module}",
        function=jax.jit(named),
        is_part=name in workload.parts,
    )
