"""The device-local call: describe it to the library, choose what runs it, call.

`make_plan` decides everything from shapes and dtypes; `run` carries a plan out and `explain`
prints one, so what is explained is what runs.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device.blas import reference
from jax_tcgemm.problem.blas_call import DEFAULT_OPTIONS, Call, batch_shape, flops, scale_dtype
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, MAX_EXTENT
from jax_tcgemm.system import modules
from jax_tcgemm.system.switches import print_choice

TARGET = "tcgemm_blas"
CUBLAS, HOST, XLA = "cublas", "host", "xla"
PLATFORM_OF = {CUBLAS: "cuda", HOST: "cpu"}
IMPLEMENTATIONS = (*PLATFORM_OF, XLA)
_CONFIG = "default"

# A batch of these is one launch an entry, unless it folds into one call (csrc/core/blas.cc).
_NOT_BATCHED_IN_CUBLAS = ("iamax", "iamin", "asum", "nrm2", "swap", "gbmv")
_SLOWER_IN_CUBLAS = "cuBLAS was measured slower than XLA"
# What cuBLAS's products are best given: as PyTorch and XLA do.
_WORKSPACE = {"gemv": 4 << 20, "trsm": 32 << 20, "gemm": 32 << 20}
_SMALL_WORKSPACE = 1 << 20


@dataclasses.dataclass(frozen=True)
class BlasProblem:
    """A call with the shapes of its operands, and the dtype of its arrays."""

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    @property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """The shapes without those of alpha and beta."""
        return self.shapes[: len(self.shapes) - 2 * self.call.scalar_args]

    @property
    def batch(self) -> tuple[int, ...]:
        """What the batch dimensions of the operands broadcast to."""
        return batch_shape(self.call, self.shapes)

    @property
    def in_dtype(self) -> str:
        """Name of the arrays' dtype."""
        return DTYPE_NAMES[self.dtype]

    @property
    def compute(self) -> str:
        """What sums are kept in, or "tf32"."""
        if self.dtype.name in ("float64", "complex128"):
            return "f64"
        return "tf32" if self.call.options.math == "tf32" and self.dtype.itemsize > 2 else "f32"

    @property
    def flops(self) -> int:
        """Real additions and multiplications."""
        return flops(self.call, self.shapes, self.dtype)

    @property
    def bytes(self) -> int:
        """Least memory traffic: every array read, and those in place written too, once."""
        elements = [math.prod(shape) for shape in self.arrays]
        written = sum(elements[-self.call.items :]) if self.call.has_c else 0
        return (sum(elements) + written) * self.dtype.itemsize

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.arrays)
        return f"{self.call.routine} {self.in_dtype} {shapes}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs a call, and why; `attributes` is the FFI call's, None where XLA runs it."""

    problem: BlasProblem
    choice: selection.Choice
    attributes: dict | None = None
    copies: tuple[str, ...] = ()


def check_implementation(op: str, implementation: str | None) -> None:
    """Raises for a name that is no implementation of BLAS calls."""
    if not isinstance(implementation, str | None) or implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
            f"got {implementation=}; None selects the best one"
        )


def make_plan(
    problem: BlasProblem, platform: str, device: selection.Device, obstacle: str = ""
) -> Plan:
    """Chooses what runs a call.

    Args:
      problem: the call and its shapes.
      platform: the platform it is lowered for.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can run it; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the call.
    """
    choice, attributes = _choose(problem, platform, device, obstacle)
    print_choice(problem.call.op, problem, choice)
    return Plan(problem, choice, attributes, _copies(problem) if attributes else ())


def _choose(problem, platform, device, obstacle) -> tuple[selection.Choice, dict | None]:
    """What runs a problem, and the attributes of its FFI call; None where that is XLA."""
    call, forced = problem.call, problem.call.implementation
    if forced == XLA:
        return selection.Choice(XLA, _CONFIG, "asked for by name"), None
    name = next((name for name, runs_on in PLATFORM_OF.items() if runs_on == platform), None)
    attributes, reason = None, obstacle
    if forced not in (None, name):
        reason = f"it runs on {PLATFORM_OF[forced]}, not on {platform}"
    reason = reason or _obstacle(problem, name, platform)
    if not reason:
        attributes = _attributes(problem, name)
        queries = _module(name).blas
        query = attributes | {"dtype": problem.in_dtype}
        reason = queries.reject(name, _CONFIG, query, device.query())
    if reason and forced is not None:
        raise ValueError(
            f"{call.op}: implementation must be able to run the call, got "
            f"implementation={forced!r}: {forced} cannot run this: {reason}; "
            "implementation=None selects one that can"
        )
    if reason:
        candidates = (selection.Candidate(name, _CONFIG, reason),) if name else ()
        return selection.Choice(XLA, _CONFIG, reason, candidates=candidates), None
    by_entry = name == CUBLAS and call.routine in _NOT_BATCHED_IN_CUBLAS and attributes["batch"] > 1
    if forced is None and by_entry:
        why = f"cuBLAS has no batched {call.routine}: it would be a launch an entry"
        return selection.Choice(XLA, _CONFIG, why), None
    if forced is None and name == CUBLAS and _is_slower(problem):
        return selection.Choice(XLA, _CONFIG, _SLOWER_IN_CUBLAS), None
    if forced is None and name == HOST and not _gains_on_host(problem):
        return selection.Choice(XLA, _CONFIG, "host is not known to gain on XLA on a CPU"), None
    workspace_bytes = queries.workspace_bytes(name, _CONFIG, query, device.query())
    if name == CUBLAS:
        recommended = _WORKSPACE.get(call.routine, _SMALL_WORKSPACE)
        workspace_bytes += call.options.workspace_bytes or recommended
    why = "asked for by name" if forced else f"the library of BLAS calls on {platform}"
    return selection.Choice(name, _CONFIG, why, workspace_bytes), attributes


def _is_slower(problem: BlasProblem) -> bool:
    """Whether cuBLAS was measured slower than XLA; options that were set need cuBLAS.

    Bands are a hundred times slower and more, rows of float32 matrices 1.3 times
    (benchmarks/results/h200-blas.jsonl).
    """
    call = problem.call
    if call.options != DEFAULT_OPTIONS:
        return False
    rows = call.routine == "gemv" and call.op_a == "N" and problem.in_dtype == "f32"
    return call.routine == "gbmv" or rows


def _gains_on_host(problem: BlasProblem) -> bool:
    """Whether `host` took clearly less time than XLA:CPU in a loop.

    Below this work a call costs more than it brings. XLA does the other routines as fast, and fuses
    them with what is around.
    """
    return problem.call.routine in ("gbmv", "nrm2", "trsm", "trsv") and problem.flops > 2**18


def _copies(problem: BlasProblem) -> tuple[str, ...]:
    """Every array that has to be repeated for the call, in words."""
    batch = problem.batch
    inputs, c, _ = problem.call.split(problem.shapes)
    repeated = [
        shape
        for group in inputs
        if any(math.prod(shape[: len(batch)]) > 1 for shape in group)
        for shape in group
    ]
    return tuple(
        f"array of {shape} repeated over the batch {batch}"
        for shape in (*repeated, *(c or ()))
        if shape[: len(batch)] != batch
    )


def _module(name: str):
    return modules.cpu if name == HOST else modules.cuda


def _obstacle(problem: BlasProblem, name, platform) -> str:
    """Why no library can run a call, before it is asked; "" when one may."""
    if name is None:
        return f"no implementation runs on {platform}"
    if _module(name) is None:
        return modules.reason("cpu" if name == HOST else "cuda")
    if name == CUBLAS and (reason := modules.cublas_reason()):
        return reason
    if any(0 in shape for shape in problem.shapes) or 0 in (problem.call.n, problem.call.columns):
        return "it is empty"
    if math.prod(problem.batch) > MAX_EXTENT:
        return "its batch has more than 2**31 - 1 entries"
    if problem.call.scalar_args and any(math.prod(shape) > 1 for shape in problem.shapes[-2:]):
        return "its scalars differ over the batch"
    return ""


def _attributes(problem: BlasProblem, name: str) -> dict:
    """The FFI attribute `blas` (csrc/ffi/blas.h)."""
    call, shapes, batch = problem.call, problem.shapes, problem.batch
    inputs, c, _ = call.split(zip(shapes, call.operand_ranks, strict=True))
    a = _widest(inputs[0]) if inputs else None
    b = _widest(inputs[1]) if len(inputs) > 1 else None
    out = c[0] if c else None
    x_increment, y_increment = call.increments
    m, n, k = _extents(call, a, b, out)
    layouts = {"a": (1, 0), "b": (1, 0), "c": (1, 0)}
    match call.routine:
        case "scal" | "swap":
            layouts["c"] = _vector(out, batch, x_increment, in_place=True)
            if call.routine == "swap":
                layouts["b"] = _vector(c[1], batch, y_increment, in_place=True)
        case "gemv" | "gbmv":
            layouts["a"] = _matrix(a, batch)
            layouts["b"] = _vector(b, batch, x_increment)
            length = m if call.op_a == "N" else n
            y = out or ((length,), 1)
            layouts["c"] = _vector(y, batch, y_increment, in_place=True)
        case "trsv":
            layouts["a"] = _matrix(a, batch)
            layouts["c"] = _vector(out, batch, x_increment, in_place=True)
        case "trsm" | "gemm":
            layouts["a"] = _matrix(a, batch)
            if b:
                layouts["b"] = _matrix(b, batch)
            layouts["c"] = (n, m * n)
        case _:
            layouts["a"] = _vector(a, batch, x_increment)
            if b:
                layouts["b"] = _vector(b, batch, y_increment)
            if out:
                layouts["c"] = _vector(out, batch, y_increment, in_place=True)
    alpha, beta = complex(call.alpha), complex(call.beta)
    found = {
        "abi": _module(name).abi_version,
        "implementation": name,
        "config": _CONFIG,
        "routine": call.routine,
        "op_a": call.op_a,
        "op_b": call.op_b,
        "math": call.options.math,
        "batch": math.prod(batch),
        "items": call.items,
        "m": m,
        "n": n,
        "k": k,
        "kl": call.kl,
        "ku": call.ku,
        "upper": call.upper,
        "right": call.right,
        "unit": call.unit,
        "has_c": call.has_c,
        "scalar_args": call.scalar_args,
        "atomics": call.options.atomics,
        "alpha_re": alpha.real,
        "alpha_im": alpha.imag,
        "beta_re": beta.real,
        "beta_im": beta.imag,
    }
    for key, (ld, stride) in layouts.items():
        found |= {f"{key}_ld": ld, f"{key}_stride": stride}
    return found


def _widest(group) -> tuple:
    """The (shape, rank) of an item that has all of the batch, if any of them has some."""
    return max(group, key=lambda item: math.prod(item[0]))


def _extents(call, a, b, c) -> tuple[int, int, int]:
    """M, n and k of core/blas.h."""
    match call.routine:
        case "gemv":
            return (*a[0][-2:], 1)
        case "gbmv":
            return a[0][-2], call.columns, 1
        case "trsv":
            return a[0][-1], 1, 1
        case "trsm":
            return (*c[0][-2:], 1)
        case "gemm":
            m, k = a[0][-2:] if call.op_a == "N" else a[0][:-3:-1]
            n = b[0][-1] if call.op_b == "N" else b[0][-2]
            return m, n, k
        case _:
            return 1, call.n, 1


def _vector(operand, batch, increment: int, in_place: bool = False) -> tuple[int, int]:
    """Increment and batch stride of a (shape, rank); in place it has every entry of the batch."""
    (shape, _) = operand
    stacked = in_place or math.prod(shape[:-1]) > 1
    return increment, shape[-1] if stacked and math.prod(batch) > 1 else 0


def _matrix(operand, batch) -> tuple[int, int]:
    """Leading dimension and batch stride."""
    (shape, _) = operand
    stacked = math.prod(shape[:-2]) > 1 and math.prod(batch) > 1
    return shape[-1], math.prod(shape[-2:]) if stacked else 0


def run(call: Call, *operands, plan: Plan, types: Sequence) -> list:
    """Carries out a plan: the call's results, whose shapes and dtypes are `types`."""
    if plan.attributes is None:
        return reference.run(call, *operands)
    batch = batch_shape(call, [x.shape for x in operands])
    inputs, c, scalars = call.split(operands)
    flat = [x for group in inputs for x in _with_batch(group, batch)]
    # In place, every entry of the batch is there.
    c = c and tuple(_repeat(x, batch) for x in c)
    first_c = len(flat)
    flat += list(c or ())
    if scalars is not None:
        dtype = scale_dtype(flat[0].dtype)
        flat += [lax.convert_element_type(x.reshape(()), dtype) for x in scalars]
    results = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in types]
    if plan.choice.workspace_bytes:
        results.append(jax.ShapeDtypeStruct((plan.choice.workspace_bytes,), jnp.uint8))
    aliases = {first_c + i: i for i in range(call.items)} if c else None
    ffi_call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    found = ffi_call(*flat, blas=plan.attributes)[: call.items]
    if call.routine in ("iamax", "iamin"):
        return [found[0] - 1]  # BLAS counts from 1.
    return list(found)


def _with_batch(group, batch):
    """Arrays with all of the batch, or with none of it: what one batch stride can say."""
    if all(math.prod(x.shape[: len(batch)]) == 1 for x in group):
        return group
    return [_repeat(x, batch) for x in group]


def _repeat(x, batch):
    return jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
