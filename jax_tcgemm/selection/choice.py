"""Selection of the implementation and config that run a problem, as one printable `Choice`.

The first of these that applies decides: an implementation named by the caller; a table of measured
choices (tables.py); the cost model's estimated times (cost_model), where wgmma can run; a fixed
order of preference. Selection happens while a program is traced or lowered, from the problem, the
device and tables that are read once in a process, so one program always gets the same choices.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.call_options import CallOptions, Provenance
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import implementations, rules, tables, tiny_batches, xla_forms
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.implementations import (
    ARGUMENTS,
    IMPLEMENTATIONS_OF,
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
from jax_tcgemm.selection.observation import is_unseen, observe
from jax_tcgemm.selection.ranking import broadcast_form, candidates, measured, predicted, preferred
from jax_tcgemm.system import errors
from jax_tcgemm.system.switches import print_choice, switch

# Not batch-invariant: either the accumulation order depends on the number of rows, or the number of
# rows is limited.
_NOT_INVARIANT = (XLA, "cublaslt", tiny_batches.IMPLEMENTATION)

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
        if kind == "gemm" and problem.scales is None and not is_unseen():
            observe(problem, device)
        choice = _best(problem, device, tables.revision())
    if not is_unseen():
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
    best = measured(problem, device, considered) or preferred(problem, device, considered)
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
            found = preferred(problem, device, considered)
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
    best = measured(problem, device, able) or preferred(problem, device, able)
    return best or (None, _obstacle(able))


def _obstacle(considered: Sequence[Candidate]) -> str:
    """Return why no candidate can run: the most common reason, on a tie the first one."""
    return collections.Counter(candidate.reason for candidate in considered).most_common(1)[0][0]


@functools.lru_cache(maxsize=4096)
def _best(problem: AnyProblem, device: Device, revision: int) -> Choice:
    del revision  # A cache key only: the result depends on the tables.
    considered = candidates(problem, device)
    if (small := broadcast_form(problem, device, considered)) is not None:
        best, why = small, "a batch of tiny matrices, which XLA fuses with what is around it"
    elif (tuned := measured(problem, device, considered)) is not None:
        best, why = tuned
    elif device.platform == "cpu":
        best, why = rules.on_cpu(problem, considered)
    elif problem.kind == "blas":
        best, why = rules.of_blas(problem, considered)
    else:
        best, why = preferred(problem, device, considered)
    return _chosen(best, why, problem, device, considered)


def forget() -> None:
    """Clear cached choices, after the extension modules or the rules have changed."""
    _best.cache_clear()
    _of_nominal.cache_clear()
    predicted.cache_clear()
    configs_of.cache_clear()


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
