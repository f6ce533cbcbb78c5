"""Implementations by name: their platforms, problem kinds and configs, and forcing one by name."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.all_reduce import AllReduceProblem
from jax_tcgemm.problem.blas.problem import BlasProblem
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.operands.quantize import QuantizeProblem
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.problem.split import SplitProblem
from jax_tcgemm.selection import xla_forms
from jax_tcgemm.selection.configs import WgmmaConfig, order_of_sums, parse_or_none
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.system import errors, modules

XLA = "xla"
XLA_CONFIG = xla_forms.DEFAULT

# Names of the CUDA implementations, in selection's order of preference. They are listed here so
# that a build without the _cuda module tells a missing implementation from a misspelt name.
_CUDA_PREFERENCE = (
    "wgmma",
    "cublaslt",
    "mma_sync",
    "wmma_tiled",
    "simt_tiled",
    "simt_batched",
    "wmma_naive",
    "simt_naive",
)
IMPLEMENTATIONS = (*_CUDA_PREFERENCE, "host", XLA)
_CUDA_ALONE = (*_CUDA_PREFERENCE, "simt", "packed", "quantize", "split", "cublas", "peer_memory")
PLATFORM_OF = dict.fromkeys(_CUDA_ALONE, "cuda") | {"host": "cpu"}

AnyProblem = (
    Problem
    | RaggedProblem
    | RowsProblem
    | PackedProblem
    | QuantizeProblem
    | SplitProblem
    | AllReduceProblem
    | BlasProblem
)

# The implementations of each kind of problem (`Problem.kind`).
IMPLEMENTATIONS_OF = {
    "gemm": IMPLEMENTATIONS,
    "ragged": ("wgmma", "mma_sync", "host", XLA),
    "rows": ("simt", "host", XLA),
    "packed": ("packed", XLA),
    "quantize": ("quantize", XLA),
    "split": ("split", XLA),
    "blas": ("cublas", "host", XLA),
    "all_reduce": ("peer_memory", XLA),
    # In the order of preference at equal times; "gemm" is one of our GEMMs.
    "contract": (XLA, "gemm", "cutensor"),
    "permute": (XLA, "cutensor", "tcgemm"),
    "elementwise_binary": (XLA, "cutensor"),
    "elementwise_trinary": (XLA, "cutensor"),
    "reduce": (XLA, "cutensor", "tcgemm"),
}
# Nouns for error messages, for kinds of problems other than products.
_NOUNS = {"blas": "call"} | dict.fromkeys(
    (
        "contract",
        "permute",
        "elementwise_binary",
        "elementwise_trinary",
        "reduce",
        "quantize",
        "all_reduce",
    ),
    "operation",
)


# --- forcing an implementation by name ----------------------------------------------------------


class Source(NamedTuple):
    """Names of the two settings that force an implementation and its config, for messages."""

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
    config: str | None = None,
    kind: str = "gemm",
    source: Source = ARGUMENTS,
) -> None:
    """Raise ValueError for an unknown implementation or config, TypeError for a non-string.

    `kind` is the kind of problem (`Problem.kind`) that the implementation must know.
    """
    for what, value in ((source.implementation, implementation), (source.config, config)):
        if value is not None and not isinstance(value, str):
            raise errors.of_call(
                TypeError,
                op,
                f"{what} must be a string or None, got {what}={value!r}; see jax_tcgemm.info()",
            )
    if implementation is None:
        if config is not None:
            raise errors.of_call(
                ValueError,
                op,
                f"{source.config} must come with an implementation, got "
                f"{source.config}={config!r}; give {source.implementation}, too",
            )
        return
    if implementation not in IMPLEMENTATIONS_OF[kind]:
        raise errors.of_call(
            ValueError,
            op,
            f"{source.implementation} must be one of {', '.join(IMPLEMENTATIONS_OF[kind])}, "
            f"got {source.implementation}={implementation!r}; {source.remedy}",
        )
    if config is None:
        return
    configs = configs_of(implementation, kind)
    if configs and config not in configs:
        raise errors.of_call(
            ValueError,
            op,
            f"{source.config} must be one of {listed(configs, ', ')} for {implementation}, "
            f"got {source.config}={config!r}; {source.remedy}",
        )


def may_be_unfused(options: CallOptions) -> bool:
    """Return whether the product may run unfused, with its epilogue computed by XLA."""
    return options.implementation in (None, XLA)


def refusal(op: str, kind: str, name: str, reason: str, source: Source = ARGUMENTS) -> ValueError:
    """Return the error for a forced implementation that cannot run a problem of this kind."""
    return errors.of_call(
        ValueError,
        op,
        f"{source.implementation} must be able to run the {_NOUNS.get(kind, 'product')}, got "
        f"{source.implementation}={name!r}: {name} cannot run this: {reason}; {source.remedy}",
    )


def listed(configs: Sequence[str], separator: str) -> str:
    """Return configs as text; split-K variants of a config are summarized at the end."""
    bases, splits = {}, {}
    for name in configs:
        config = parse_or_none(name)
        if isinstance(config, WgmmaConfig) and config.num_splits > 1:
            bases[config.unsplit] = True
            splits[str(config.num_splits)] = True
        else:
            bases[name] = True
    text = separator.join(bases)
    return f"{text}, each also with _split and {', '.join(splits)}" if splits else text


# --- queries to the extension modules -----------------------------------------------------------


class Candidate(NamedTuple):
    """Implementation and config; `reason` says why it cannot run a problem, "" if it can."""

    implementation: str
    config: str
    reason: str

    @property
    def name(self) -> str:
        """`implementation/config`."""
        return f"{self.implementation}/{self.config}"


def abi_of(implementation: str) -> int:
    """Return the ABI number of the module with an implementation; 0 for XLA's own dot."""
    return 0 if implementation == XLA else _module(implementation).abi_version


def _module(implementation: str):
    return getattr(modules, PLATFORM_OF[implementation])


def _queries(implementation: str, kind: str):
    """Return the module's queries for a kind of problems (csrc/modules/queries.h), or None."""
    module = _module(implementation)
    return module if kind == "gemm" else getattr(module, kind, None)


@functools.cache
def configs_of(implementation: str, kind: str = "gemm") -> tuple[str, ...]:
    """Return an implementation's configs, the default first; () when this build lacks them."""
    if implementation == XLA:
        return xla_forms.FORMS if kind == "gemm" else (XLA_CONFIG,)
    queries = _queries(implementation, kind)
    return tuple(queries.implementations().get(implementation, ())) if queries is not None else ()


def considered(
    implementation: str, configs: tuple[str, ...], problem: AnyProblem, device: Device
) -> tuple[Candidate, ...]:
    """Return candidates for one config or all configs, each with the rule that stops it or ""."""
    if reason := _missing(implementation, problem, device):
        return tuple(Candidate(implementation, config, reason) for config in configs)
    queries = _queries(implementation, problem.kind)
    arguments = (problem.query(), device.query())
    if len(configs) == 1:
        reasons = [queries.reject(implementation, configs[0], *arguments)]
    else:
        reasons = queries.rejections(implementation, *arguments)
    able = _able(implementation, configs)
    return tuple(
        candidate._replace(reason=why) if why else candidate
        for candidate, why in zip(able, reasons, strict=True)
    )


def considered_alike(
    candidate: Candidate, problem: AnyProblem, device: Device
) -> tuple[Candidate, ...]:
    """Return the candidates of all configs with the accumulation order of `candidate`.

    A wgmma instruction adds all its products over K to an accumulator at once. The bits of an
    accumulator therefore do not depend on the tile, only on how K is split. This was checked for
    all configs on an H100, bit for bit. Other implementations have one config for each order.
    """
    implementation, config, _ = candidate
    if implementation != "wgmma":
        return considered(implementation, (config,), problem, device)
    function = problem.function
    reduces = function is not None and any(x.neighbors > 1 for x in function.results)
    found = considered(implementation, configs_of(implementation, problem.kind), problem, device)
    own = order_of_sums(config, reduces)
    return tuple(c for c in found if order_of_sums(c.config, reduces) == own)


def _missing(implementation: str, problem: AnyProblem, device: Device) -> str:
    """Return why no config of an implementation can run a problem; "" if its module decides."""
    platform = PLATFORM_OF[implementation]
    if platform != device.platform:
        return f"it runs on {platform}, not on {device.platform}"
    if not configs_of(implementation, problem.kind):
        return modules.reason(platform) or "it is not part of this build"
    if implementation == "cublaslt":
        return modules.cublaslt_reason()
    if implementation == "peer_memory":
        return "" if device.assumed else modules.peer_access_reason()
    if implementation == "cublas":
        return modules.cublas_reason() or problem.obstacle
    return problem.obstacle if problem.kind == "blas" else ""


@functools.lru_cache(maxsize=64)
def _able(implementation: str, configs: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Return candidates without an obstacle, cached because wgmma has over a thousand configs."""
    return tuple(Candidate(implementation, config, "") for config in configs)


def workspace_bytes(candidate: Candidate, problem: AnyProblem, device: Device) -> int:
    """Return the scratch memory in bytes of a candidate for a problem that it can run."""
    if candidate.implementation == XLA:
        return 0
    queries = _queries(candidate.implementation, problem.kind)
    arguments = (candidate.implementation, candidate.config, problem.query(), device.query())
    num_bytes = queries.workspace_bytes(*arguments)
    if candidate.implementation == "cublas":
        num_bytes += problem.cublas_workspace_bytes
    return num_bytes


def kernels(candidate: Candidate, problem: AnyProblem, device: Device) -> tuple[Instance, ...]:
    """Return the kernels that a program must embed to run a candidate."""
    if candidate.implementation == XLA:
        return ()
    queries = _queries(candidate.implementation, problem.kind)
    arguments = (candidate.implementation, candidate.config, problem.query(), device.query())
    function = getattr(problem, "function", None)

    def definitions(name: str) -> str:
        return function.definitions if function is not None and function.name in name else ""

    return tuple(
        Instance(candidate.implementation, (header,), name, target, definitions(name))
        for header, name, target in queries.kernels(*arguments)
    )
