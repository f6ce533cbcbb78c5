"""What runs a tensor operation: one component, one printable result.

`make_plan` decides from the operation and the device, `run` carries a plan out and `explain` prints
one. In this order: what was asked for by name; for contractions what the cost model predicts to be
fastest; for everything else XLA, which runs at memory's speed as well and fuses with its
neighbours.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import NamedSharding

from jax_tcgemm import selection
from jax_tcgemm.device import dense
from jax_tcgemm.device.tensor import cutensor, kernels, reference
from jax_tcgemm.problem.compute_types import cutensor_compute, precision_of
from jax_tcgemm.problem.operation import Operation, dot_dimensions
from jax_tcgemm.problem.operators import UNARY
from jax_tcgemm.selection import XLA, Candidate, Choice, Device, contraction_cost
from jax_tcgemm.system import modules
from jax_tcgemm.system.switches import print_choice

# Of each kind of operation, in the order of preference among equals.
IMPLEMENTATIONS = {
    "contract": (XLA, "gemm", "cutensor"),
    "permute": (XLA, "cutensor", "tcgemm"),
    "elementwise_binary": (XLA, "cutensor"),
    "elementwise_trinary": (XLA, "cutensor"),
    "reduce": (XLA, "cutensor", "tcgemm"),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What one call of a primitive says.

    Attributes:
      op: the public function, for messages.
      operation: the operation; its `compute` is what was asked for by name, or "".
      precision: of a contraction, as `precision.canonical_precision` returns it.
      result_dtype: of a contraction's result.
      out_sharding: of a contraction's product, over explicit mesh axes.
      implementation: name to force, or None.
    """

    op: str
    operation: Operation
    precision: object = None
    result_dtype: np.dtype | None = None
    out_sharding: NamedSharding | None = None
    implementation: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an operation runs on one device.

    `problem` is the operation with the compute type that cuTENSOR runs it in, if it can. `gemm` is
    the plan of a contraction as one of our products, None where it is none.
    """

    request: Request
    platform: str
    problem: Operation
    gemm: dense.Plan | None
    choice: Choice

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        found = []
        if self.choice.implementation == "gemm":
            found += self.gemm.copies
        if self.choice.implementation != XLA and self.request.operation.kind == "contract":
            own = (
                ("identity", "conj") if self.choice.implementation == "cutensor" else ("identity",)
            )
            operators = zip("ab", self.request.operation.unary, strict=False)
            found += [f"{op} of {name}" for name, op in operators if op not in own]
        return tuple(found)


def is_xla(request: Request) -> bool:
    """Whether XLA runs it on any device."""
    by_default = request.implementation is None and request.operation.kind != "contract"
    return by_default or request.implementation == XLA


def check_implementation(op: str, kind: str, implementation) -> None:
    """Raises ValueError for a name that is none of this kind's implementations."""
    names = IMPLEMENTATIONS[kind]
    if not isinstance(implementation, str | None) or implementation not in (None, *names):
        raise ValueError(
            f"{op}: implementation must be one of {', '.join(names)}, got {implementation=}; "
            "None selects the best one"
        )


def make_plan(request: Request, platform: str, device: Device, obstacle: str = "") -> Plan:
    """Chooses what runs an operation.

    Args:
      request: what was asked for.
      platform: the platform it is lowered for.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can be used; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the operation.
    """
    plan = _make_plan(request, platform, device, obstacle)
    print_choice(request.op, plan.problem, plan.choice)
    return plan


def _make_plan(request, platform, device, obstacle) -> Plan:
    kind, gemm, operation = request.operation.kind, None, request.operation
    considered = _considered(request)
    if obstacle:
        reasons = dict.fromkeys(considered, obstacle) | {XLA: ""}
    else:
        operation, no_compute = _with_compute(request)
        reasons = {XLA: ""}
        if "gemm" in considered:
            gemm, reasons["gemm"] = _gemm_plan(request, platform, device)
        if "cutensor" in considered:
            reasons["cutensor"] = no_compute or _reject_cutensor(operation, platform)
        if "tcgemm" in considered:
            reasons["tcgemm"] = _reject_kernels(operation, platform)
    candidates = tuple(Candidate(name, "default", reasons[name]) for name in considered)
    if request.implementation is not None:
        name, why = _forced(request.op, request.implementation, reasons)
    elif obstacle:
        name, why = XLA, obstacle
    elif kind != "contract":
        name, why = XLA, "XLA moves memory as fast, and fuses with its neighbours"
    else:
        name, why = _choose(operation, gemm, platform, device, reasons)
    config, workspace_bytes = "default", 0
    if name == "gemm":
        config = f"{gemm.choice.implementation}/{gemm.choice.config}"
        workspace_bytes = gemm.choice.workspace_bytes
    elif name == "cutensor":
        config, workspace_bytes = operation.algorithm, cutensor.estimate(operation)[1]
    elif name == "tcgemm":
        workspace_bytes = kernels.workspace_bytes(operation, device)
    choice = Choice(name, config, why, workspace_bytes, candidates)
    return Plan(request, platform, operation, gemm, choice)


def _considered(request: Request) -> tuple[str, ...]:
    """What is asked whether it can run: asking cuTENSOR makes a plan."""
    kind = request.operation.kind
    if request.implementation is not None:
        return (request.implementation,)
    return IMPLEMENTATIONS[kind] if kind == "contract" else (XLA,)


def _forced(op, name, reasons) -> tuple[str, str]:
    if reasons[name]:
        raise ValueError(
            f"{op}: implementation must be able to run the operation, got "
            f"implementation={name!r}: {name} cannot run this: {reasons[name]}; "
            "implementation=None selects one that can"
        )
    return name, "asked for by name"


def _choose(operation, gemm, platform, device, reasons) -> tuple[str, str]:
    """The implementation of a contraction and why."""
    if platform != "cuda":
        return (XLA, reasons["gemm"]) if reasons["gemm"] else ("gemm", gemm.choice.why)
    if gemm is None or gemm.problem is None:
        return XLA, reasons["gemm"]
    return _by_cost(operation, gemm, device, reasons)


def _by_cost(operation, gemm, device, reasons) -> tuple[str, str]:
    product = contraction_cost.AsProduct(gemm.problem, gemm.choice, dense.permuted_bytes(gemm))
    us = contraction_cost.contraction_us(operation, product, device)
    able = [name for name in IMPLEMENTATIONS["contract"] if not reasons[name]]
    better = [name for name in able if name != XLA and contraction_cost.H200.beats_xla(name, us)]
    best = min(better, key=us.get, default=XLA)
    others = ", ".join(f"{us[name]:.4g} us for {name}" for name in able if name != best)
    missing = [name for name in IMPLEMENTATIONS["contract"] if reasons[name]]
    why = f"the cost model predicts {us[best]:.4g} us" + (f", {others}" if others else "")
    if missing:
        why += f"; not considered: {', '.join(missing)}"
    if device.assumed:
        why += "; no GPU here, so an H200 is assumed"
    return best, why


def _with_compute(request: Request) -> tuple[Operation, str]:
    """The operation with cuTENSOR's compute type, and why it has none."""
    operation = request.operation
    if operation.kind == "contract":
        compute, reason = cutensor_compute(
            operation.compute or None, request.precision, operation.dtype, request.result_dtype
        )
    else:
        known = cutensor.ELEMENTWISE_COMPUTE.get(operation.dtype, ("",))
        compute, reason = operation.compute or known[0], ""
    return dataclasses.replace(operation, compute=compute), reason


def _gemm_plan(request, platform, device) -> tuple[dense.Plan | None, str]:
    """A contraction as one of our products, and why none of ours runs it."""
    operation = request.operation
    if operation.kind != "contract":
        return None, "it is no contraction"
    a, b = operation.operands[:2]
    numbers, permutation = dot_dimensions(a, b, operation.result)
    if not numbers[0][0] and request.implementation is None:
        return None, "nothing is contracted"
    if operation.compute and operation.compute not in ("f32", "tf32", "f64"):
        return None, f"our products have no compute type {operation.compute}"
    if operation.compute == "f32" and operation.dtype.name in ("float64", "complex128"):
        return None, f"our products of {operation.dtype} are computed in float64"
    sum_dtype = _sum_dtype(request)
    product = dense.Product(
        op=request.op,
        lhs_shape=operation.shape(a),
        lhs_dtype=operation.dtype,
        rhs_shape=operation.shape(b),
        rhs_dtype=operation.dtype,
        result_shape=operation.shape(operation.result),
        result_dtype=sum_dtype,
        dimension_numbers=numbers,
        permutation=permutation,
        precision=_precision(request, platform),
        # On CPU, left to itself, it may be XLA's own product.
        implementation="host" if platform == "cpu" and request.implementation == "gemm" else None,
        config=None,
    )
    plan = dense.make_plan(product, platform, device)
    reason = plan.choice.why if plan.choice.implementation == XLA else ""
    return plan, reason


def _sum_dtype(request: Request) -> np.dtype:
    """What the product is made in before alpha and C: wide where either is there."""
    operation = request.operation
    if operation.scalars[0] == 1 and len(operation.operands) == 2:
        return np.dtype(request.result_dtype)
    return reference.wide(request.result_dtype)


def _precision(request: Request, platform: str):
    operation = request.operation
    return precision_of(operation.compute or None, request.precision, operation.dtype, platform)


def _reject_cutensor(operation: Operation, platform: str) -> str:
    if platform != "cuda":
        missing = cutensor.reason()
        return f"it runs on cuda, not on {platform}" + (f"; {missing}" if missing else "")
    return cutensor.reason() or cutensor.reject(operation) or cutensor.estimate(operation)[0]


def _reject_kernels(operation: Operation, platform: str) -> str:
    if platform != "cuda":
        return f"it runs on cuda, not on {platform}"
    if operation.kind not in ("permute", "reduce"):
        return "it has kernels for permute and reduce alone"
    return modules.reason("cuda") or kernels.reject(operation)


def run(plan: Plan, *operands: jax.Array) -> jax.Array:
    """Carries out a plan."""
    request, operation = plan.request, plan.problem
    match plan.choice.implementation, operation.kind:
        case "cutensor", _:
            return cutensor.call(operation, operands, plan.choice.workspace_bytes)
        case "tcgemm", _:
            return kernels.call(operation, *operands, plan.choice.workspace_bytes)
        case "gemm", _:
            return _run_gemm(plan, *operands)
        case _, "contract":
            precision = _precision(request, plan.platform)
            return reference.contract(
                operation, operands, precision, request.result_dtype, request.out_sharding
            )
        case _, "reduce":
            return reference.reduce(operation, operands)
    return reference.elementwise(operation, operands)


def _run_gemm(plan, a, b, c=None) -> jax.Array:
    operation = plan.problem
    a, b = (UNARY[op](x) for op, x in zip(operation.unary[:2], (a, b), strict=True))
    d = dense.dot_general(a, b, plan.gemm)
    alpha, beta, _ = operation.scalars
    return reference.finish_contraction(d, c, alpha, beta, plan.request.result_dtype)


def lowered(request: Request, platform: str, obstacle: str):
    """The function that a primitive lowers to."""
    plan = make_plan(request, platform, selection.target_device(platform), obstacle)
    return functools.partial(run, plan)
