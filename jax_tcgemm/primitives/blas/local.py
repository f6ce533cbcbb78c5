"""The device-local call: describe it to the library, choose what runs it, call.

`make_plan` decides everything from shapes and dtypes; `run` carries a plan out and `explain`
prints one, so what is explained is what runs.
"""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _modules, selection
from jax_tcgemm.debug import switch
from jax_tcgemm.primitives.blas import xla
from jax_tcgemm.primitives.blas.call import Call, batch_shape, flops, scale_dtype
from jax_tcgemm.problem import DTYPE_NAMES, MAX_EXTENT

TARGET = "tcgemm_blas"
CUBLAS, HOST, XLA = "cublas", "host", "xla"
PLATFORM_OF = {CUBLAS: "cuda", HOST: "cpu"}
IMPLEMENTATIONS = (*PLATFORM_OF, XLA)

# A batch of these is one launch an entry, unless it folds into one call (csrc/core/blas.cc).
_NOT_BATCHED_IN_CUBLAS = ("iamax", "iamin", "asum", "nrm2", "swap", "gbmv")
# What cuBLAS's products are best given: as PyTorch and XLA do.
_WORKSPACE = {"gemv": 4 << 20, "trsm": 32 << 20, "gemm": 32 << 20}
_SMALL_WORKSPACE = 1 << 20


@dataclasses.dataclass(frozen=True)
class BlasProblem:
    """A call with the shapes of its arrays, as `explain` shows it."""

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    @property
    def flops(self) -> int:
        """Real additions and multiplications."""
        return flops(self.call, self.shapes, self.dtype)

    @property
    def bytes(self) -> int:
        """Least memory traffic: every array read, and those in place written too, once."""
        elements = [math.prod(shape) for shape in self.shapes]
        written = sum(elements[-self.call.items :]) if self.call.has_c else 0
        return (sum(elements) + written) * self.dtype.itemsize

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.shapes)
        return f"{self.call.routine} {DTYPE_NAMES.get(self.dtype, self.dtype)} {shapes}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs a call, and why; `attributes` is the FFI call's, None where XLA runs it."""

    problem: BlasProblem
    implementation: str
    why: str
    attributes: dict | None = None
    workspace_bytes: int = 0
    rejected: dict[str, str] = dataclasses.field(default_factory=dict)


def check_implementation(op: str, implementation: str | None) -> None:
    """Raises for a name that is no implementation of BLAS calls."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
            f"got {implementation=}; None selects the best one"
        )


def make_plan(call: Call, avals, platform: str, obstacle: str = "") -> Plan:
    """Chooses what runs a call.

    Args:
      call: its static part.
      avals: types of its operands.
      platform: the platform it is lowered for.
      obstacle: a phrase saying why only XLA can run it; "" when it need not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the call.
    """
    plan = _plan(call, avals, platform, obstacle)
    if switch("TCGEMM_PRINT_CHOICE"):
        line = f"jax_tcgemm: {call.op}: {plan.problem}: {plan.implementation}: {plan.why}"
        print(line, file=sys.stderr)
    return plan


def _plan(call, avals, platform, obstacle) -> Plan:
    num_arrays = len(avals) - 2 * call.scalar_args
    arrays = avals[:num_arrays]
    problem = BlasProblem(call, tuple(tuple(x.shape) for x in arrays), np.dtype(arrays[0].dtype))
    if call.implementation == XLA:
        return Plan(problem, XLA, "asked for by name")
    name = next((name for name, runs_on in PLATFORM_OF.items() if runs_on == platform), None)
    forced = call.implementation
    attributes = None
    if forced is not None and forced != name:
        reason = f"it runs on {PLATFORM_OF[forced]}, not on {platform}"
    else:
        reason = obstacle or _obstacle(call, avals, name, platform)
    if not reason:
        attributes = _attributes(call, avals, name)
        device = selection.target_device(platform)
        module = _module(name).blas
        query = attributes | {"dtype": DTYPE_NAMES[problem.dtype]}
        reason = module.reject(name, "default", query, device.query())
    if forced is not None and reason:
        raise ValueError(
            f"{call.op}: implementation must be able to run the call, got implementation="
            f"{forced!r}: {forced} cannot run this: {reason}; implementation=None selects one "
            "that can"
        )
    if reason:
        return Plan(problem, XLA, reason, rejected={name: reason} if name else {})
    launches = name == CUBLAS and call.routine in _NOT_BATCHED_IN_CUBLAS and attributes["batch"] > 1
    if forced is None and launches:
        why = f"cuBLAS has no batched {call.routine}: it would be a launch an entry"
        return Plan(problem, XLA, why)
    workspace_bytes = module.workspace_bytes(name, "default", query, device.query())
    if name == CUBLAS:
        recommended = _WORKSPACE.get(call.routine, _SMALL_WORKSPACE)
        workspace_bytes += call.options.workspace_bytes or recommended
    why = "asked for by name" if forced else f"the library of BLAS calls on {platform}"
    return Plan(problem, name, why, attributes, workspace_bytes)


def _module(name: str):
    return _modules.cpu if name == HOST else _modules.cuda


def _obstacle(call, avals, name, platform) -> str:
    """Why no library can run a call, before it is asked; "" when one may."""
    if name is None:
        return f"no implementation runs on {platform}"
    if _module(name) is None:
        return _modules.reason("cpu" if name == HOST else "cuda")
    if name == CUBLAS and (reason := _modules.cublas_reason()):
        return reason
    dtype = np.dtype(avals[0].dtype)
    if dtype not in DTYPE_NAMES:
        return f"no library has routines for {dtype}"
    if any(0 in aval.shape for aval in avals) or call.n == 0:
        return "it is empty"
    batch = batch_shape(call, [aval.shape for aval in avals])
    if math.prod(batch) > MAX_EXTENT:
        return "its batch has more than 2**31 - 1 entries"
    if call.scalar_args and any(math.prod(aval.shape) > 1 for aval in avals[-2:]):
        return "its scalars differ over the batch"
    return ""


def _attributes(call: Call, avals, name: str) -> dict:
    """The FFI attribute `blas` (csrc/ffi/blas.h)."""
    shapes = [tuple(aval.shape) for aval in avals]
    batch = batch_shape(call, shapes)
    inputs, c, _ = call.split(zip(shapes, call.operand_ranks, strict=True))
    a = inputs[0][0] if inputs else None
    b = inputs[1][0] if len(inputs) > 1 else None
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
        "config": "default",
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


def run(call: Call, *operands, plan: Plan) -> list:
    """Carries out a plan: the call's results."""
    if plan.implementation == XLA:
        return xla.run(call, *operands)
    batch = batch_shape(call, [x.shape for x in operands])
    inputs, c, scalars = call.split(
        _with_batch(x, rank, batch) for x, rank in zip(operands, call.operand_ranks, strict=True)
    )
    # In place, every entry of the batch is there.
    c = c and tuple(jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :])) for x in c)
    flat = [x for group in inputs for x in group]
    first_c = len(flat)
    flat += list(c or ())
    if scalars is not None:
        dtype = scale_dtype(flat[0].dtype)
        flat += [lax.convert_element_type(x.reshape(()), dtype) for x in scalars]
    outs = jax.eval_shape(functools.partial(xla.run, call), *operands)
    results = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
    if plan.workspace_bytes:
        results.append(jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    aliases = {first_c + i: i for i in range(call.items)} if c else None
    ffi_call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    found = ffi_call(*flat, blas=plan.attributes)[: call.items]
    if call.routine in ("iamax", "iamin"):
        return [found[0] - 1]  # BLAS counts from 1.
    return list(found)


def _with_batch(x, rank: int, batch):
    """`x` with all of the batch, or with none of it: what one batch stride can say."""
    own = x.shape[: x.ndim - rank]
    if own == tuple(batch) or math.prod(own) == 1:
        return x
    return jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - rank :]))
