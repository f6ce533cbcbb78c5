"""The implementations by name: what each runs, and where, its configs, and how it is asked for."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.blas import BlasProblem
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.problem.packed import PackedProblem
from jax_tcgemm.problem.quantize import QuantizeProblem
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.problem.split import SplitProblem
from jax_tcgemm.selection import xla_forms
from jax_tcgemm.selection.configs import WgmmaConfig, order_of_sums, parse_or_none
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.system import modules

XLA = "xla"
XLA_CONFIG = xla_forms.DEFAULT

# The names of the CUDA implementations, in the order in which selection prefers them. Known
# without the _cuda module too, so that a build without it tells a missing one from a misspelt one.
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
_CUDA_ALONE = (*_CUDA_PREFERENCE, "simt", "packed", "quantize", "split", "cublas")
PLATFORM_OF = dict.fromkeys(_CUDA_ALONE, "cuda") | {"host": "cpu"}

AnyProblem = (
    Problem
    | RaggedProblem
    | RowsProblem
    | PackedProblem
    | QuantizeProblem
    | SplitProblem
    | BlasProblem
)

# Those that know each kind of problem (`Problem.kind`).
IMPLEMENTATIONS_OF = {
    "gemm": IMPLEMENTATIONS,
    "ragged": ("wgmma", "mma_sync", "host", XLA),
    "rows": ("simt", "host", XLA),
    "packed": ("packed", XLA),
    "quantize": ("quantize", XLA),
    "split": ("split", XLA),
    "blas": ("cublas", "host", XLA),
    # In the order of preference among equals; "gemm" is one of our products.
    "contract": (XLA, "gemm", "cutensor"),
    "permute": (XLA, "cutensor", "tcgemm"),
    "elementwise_binary": (XLA, "cutensor"),
    "elementwise_trinary": (XLA, "cutensor"),
    "reduce": (XLA, "cutensor", "tcgemm"),
}
# What messages call a problem that is none of a product.
_NOUNS = {"blas": "call"} | dict.fromkeys(
    ("contract", "permute", "elementwise_binary", "elementwise_trinary", "reduce", "quantize"),
    "operation",
)


# --- asking for one by name ---------------------------------------------------------------------


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
    config: str | None = None,
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
    if config is None:
        return
    configs = configs_of(implementation, kind)
    if configs and config not in configs:
        raise ValueError(
            f"{op}: {source.config} must be one of {listed(configs, ', ')} for {implementation}, "
            f"got {source.config}={config!r}; {source.remedy}"
        )


def may_be_unfused(options: CallOptions) -> bool:
    """Return whether the product may run alone, and XLA what follows it."""
    return options.implementation in (None, XLA)


def refusal(op: str, kind: str, name: str, reason: str, source: Source = ARGUMENTS) -> ValueError:
    """The error of an implementation that was asked for and cannot run a problem of this kind."""
    return ValueError(
        f"{op}: {source.implementation} must be able to run the {_NOUNS.get(kind, 'product')}, got "
        f"{source.implementation}={name!r}: {name} cannot run this: {reason}; {source.remedy}"
    )


def listed(configs: Sequence[str], separator: str) -> str:
    """Configs as text; those that are others with K split are not said one by one."""
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


# --- asking the modules that they are in --------------------------------------------------------


class Candidate(NamedTuple):
    """An implementation with a config; `reason` says why it cannot run, "" when it can."""

    implementation: str
    config: str
    reason: str

    @property
    def name(self) -> str:
        """`implementation/config`."""
        return f"{self.implementation}/{self.config}"


def abi_of(implementation: str) -> int:
    """The ABI number of the module that an implementation is in; 0 for XLA's own dot."""
    return 0 if implementation == XLA else _module(implementation).abi_version


def _module(implementation: str):
    return getattr(modules, PLATFORM_OF[implementation])


def _queries(implementation: str, kind: str):
    """What answers for an implementation and a kind of problems (csrc/modules/queries.h)."""
    module = _module(implementation)
    return module if kind == "gemm" else getattr(module, kind, None)


@functools.cache
def configs_of(implementation: str, kind: str = "gemm") -> tuple[str, ...]:
    """The configs of an implementation, the default first; empty when it is not in this build."""
    if implementation == XLA:
        return xla_forms.FORMS if kind == "gemm" else (XLA_CONFIG,)
    queries = _queries(implementation, kind)
    return tuple(queries.implementations().get(implementation, ())) if queries is not None else ()


def considered(
    implementation: str, configs: tuple[str, ...], problem: AnyProblem, device: Device
) -> tuple[Candidate, ...]:
    """One config of an implementation, or all, each with the rule that stops it, "" for none."""
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
    """A candidate for other rows, and the configs that add up each sum in the order that it has.

    An instruction of wgmma adds what it multiplies of a step of K to its sums at once, so that
    these have the same bits whatever tile they are part of, as long as K is divided alike: those of
    all configs on an H100, bit for bit.
    """
    implementation, config, _ = candidate
    if implementation != "wgmma":
        return considered(implementation, (config,), problem, device)
    function = problem.function
    reduces = function is not None and any(x.neighbours > 1 for x in function.results)
    found = considered(implementation, configs_of(implementation, problem.kind), problem, device)
    own = order_of_sums(config, reduces)
    return tuple(c for c in found if order_of_sums(c.config, reduces) == own)


def _missing(implementation: str, problem: AnyProblem, device: Device) -> str:
    """Why an implementation need not be asked whether it can run a problem; "" if it must be."""
    platform = PLATFORM_OF[implementation]
    if platform != device.platform:
        return f"it runs on {platform}, not on {device.platform}"
    if not configs_of(implementation, problem.kind):
        return modules.reason(platform) or "it is not part of this build"
    if implementation == "cublaslt":
        return modules.cublaslt_reason()
    if implementation == "cublas":
        return modules.cublas_reason() or problem.obstacle
    return problem.obstacle if problem.kind == "blas" else ""


@functools.lru_cache(maxsize=64)
def _able(implementation: str, configs: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Candidates that nothing stops: the same for every problem, for wgmma has over a thousand."""
    return tuple(Candidate(implementation, config, "") for config in configs)


def workspace_bytes(candidate: Candidate, problem: AnyProblem, device: Device) -> int:
    """Scratch memory that a candidate wants for a problem which it can run."""
    if candidate.implementation == XLA:
        return 0
    queries = _queries(candidate.implementation, problem.kind)
    arguments = (candidate.implementation, candidate.config, problem.query(), device.query())
    num_bytes = queries.workspace_bytes(*arguments)
    if candidate.implementation == "cublas":
        num_bytes += problem.cublas_workspace_bytes
    return num_bytes


def kernels(candidate: Candidate, problem: AnyProblem, device: Device) -> tuple[Instance, ...]:
    """The kernels of a candidate, which a program must bring."""
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
