"""The device-local tensor operation: say what else it is, choose, call.

As in dense/plan.py, `make_plan` decides everything from shapes and dtypes, `run` carries a plan out
and `explain` prints one.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jax_tcgemm.device import tensor_reference as reference
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.plan import BasePlan
from jax_tcgemm.kernels.program import carried
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.compute_types import ELEMENTWISE_COMPUTE, cutensor_compute, precision_of
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import for_xla, is_split
from jax_tcgemm.problem.tensor.folding import fold_permutation, fold_reduction
from jax_tcgemm.problem.tensor.operation import Operation, dot_dimensions
from jax_tcgemm.problem.tensor.operators import UNARY
from jax_tcgemm.selection import XLA, AsProduct, Choice, Device, ranked, select_operation
from jax_tcgemm.system import modules


@dataclasses.dataclass(frozen=True)
class Request:
    """One call of a tensor primitive, as its planner takes it.

    Attributes:
      options: options of the call.
      operation: the operation; its `compute` is what was asked for by name, or "".
      precision: of a contraction, as `precision.canonical_precision` returns it.
      result_dtype: of a contraction's result.
      out_sharding: of a contraction's product, over explicit mesh axes.
      symmetric: whether a contraction's two operands are one array.
    """

    options: CallOptions
    operation: Operation
    precision: object = None
    result_dtype: np.dtype | None = None
    out_sharding: NamedSharding | None = None
    symmetric: bool = False

    def of_values(self, operands: Sequence) -> "Request":
        """Return the request for these operands: one array with itself may be symmetric."""
        operation = self.operation
        if operation.kind != "contract" or len(set(operation.unary[:2])) > 1:
            return self
        a, b, *_ = operands
        return dataclasses.replace(self, symmetric=True) if a == b else self

    @property
    def implementation(self) -> str | None:
        """Name to force, or None."""
        return self.options.implementation


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How an operation runs on one device.

    `problem` is the operation with the compute type that cuTENSOR runs it in, if it can. `gemm` is
    the plan of a contraction as one of our products, None where it is none.
    """

    request: Request
    platform: str
    problem: Operation
    gemm: dense_plan.Plan | None
    choice: Choice

    @property
    def copies(self) -> tuple[str, ...]:
        """Every array that XLA must rewrite for the call."""
        found = []
        if self.choice.implementation == "gemm":
            found += self.gemm.copies
        if not self.runs_by_xla and self.request.operation.kind == "contract":
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


def make_plan(request: Request, device: Device, obstacle: str = "") -> Plan:
    """Chooses what runs an operation.

    Args:
      request: what was asked for.
      device: the device it will run on.
      obstacle: a phrase saying why only XLA can be used; "" when not.

    Returns:
      The plan.

    Raises:
      ValueError: when an implementation was forced that cannot run the operation.
    """
    operation, gemm, product, no_compute = request.operation, None, "", ""
    if not obstacle:
        operation, no_compute = _with_compute(request)
        is_own = request.implementation in (None, "gemm") or _is_split(request, device.platform)
        if operation.kind == "contract" and is_own:
            gemm, product = _as_product(request, device)
            if gemm is not None and gemm.problem is not None:
                operation = dataclasses.replace(operation, symmetric=gemm.problem.symmetric)
    choice = select_operation(
        request.options,
        operation,
        device,
        product=product,
        no_compute=no_compute,
        obstacle=obstacle,
    )
    return Plan(request, device.platform, operation, gemm, choice)


def _with_compute(request: Request) -> tuple[Operation, str]:
    """The operation with cuTENSOR's compute type, and why it has none."""
    operation = request.operation
    if operation.kind == "contract":
        compute, reason = cutensor_compute(
            operation.compute or None, request.precision, operation.dtype, request.result_dtype
        )
    else:
        known = ELEMENTWISE_COMPUTE.get(operation.dtype, ("",))
        compute, reason = operation.compute or known[0], ""
    return dataclasses.replace(operation, compute=compute), reason


def _as_product(request, device) -> tuple[dense_plan.Plan | None, AsProduct | str]:
    """A contraction as one of our products; or why none of ours runs it."""
    operation = request.operation
    a, b = operation.operands[:2]
    numbers, permutation = dot_dimensions(a, b, operation.result)
    if not numbers[0][0] and request.implementation is None:
        return None, "nothing is contracted"
    if operation.compute and operation.compute not in ("f32", "tf32", "f64", "3xtf32", "9xbf16"):
        return None, f"our products have no compute type {operation.compute}"
    if operation.compute == "f32" and operation.dtype.name in ("float64", "complex128"):
        return None, f"our products of {operation.dtype} are computed in float64"
    sum_dtype = _sum_dtype(request)
    product = dense.Product(
        options=request.options.of_step(),
        lhs_shape=operation.shape(a),
        lhs_dtype=operation.dtype,
        rhs_shape=operation.shape(b),
        rhs_dtype=operation.dtype,
        result_shape=operation.shape(operation.result),
        result_dtype=sum_dtype,
        dimension_numbers=numbers,
        permutation=permutation,
        precision=_precision(request, device.platform),
        symmetric=request.symmetric,
    )
    plan = dense_plan.make_plan(product, device)
    if request.implementation == "gemm" and plan.is_of_xla:
        own = _fastest_of_ours(product, device)
        forced = request.options.selecting(own)
        plan = dense_plan.make_plan(dataclasses.replace(product, options=forced), device)
    if plan.problem is None:
        return plan, plan.choice.why
    return plan, AsProduct(
        plan.problem, plan.choice, dense_plan.permuted_bytes(plan), plan.has_terms
    )


def _fastest_of_ours(product: dense.Product, device) -> str | None:
    """Return the fastest choice without XLA; None if only XLA runs the product or XLA chooses."""
    folded = dense.fold_product(product, device)
    if isinstance(folded, str):
        return None
    able = (candidate.implementation for candidate, _ in ranked(folded[-1], device))
    return next((name for name in able if name != XLA), None)


def _sum_dtype(request: Request) -> np.dtype:
    """Return the dtype of the product before alpha and C: wide if there is either."""
    operation = request.operation
    if operation.scalars[0] == 1 and len(operation.operands) == 2:
        return np.dtype(request.result_dtype)
    return wide_dtype(request.result_dtype)


def _is_split(request: Request, platform: str) -> bool:
    return is_split(_precision(request, platform))


def _precision(request: Request, platform: str):
    operation = request.operation
    return precision_of(operation.compute or None, request.precision, operation.dtype, platform)


def run(plan: Plan, *operands: jax.Array) -> jax.Array:
    """Carries out a plan."""
    request, operation = plan.request, plan.problem
    match plan.choice.implementation, operation.kind:
        case "cutensor", _:
            return _call_cutensor(operation, operands, plan.choice.workspace_bytes)
        case "tcgemm", _:
            return _call_kernel(operation, *operands, plan.choice)
        case "gemm", _:
            return _run_gemm(plan, *operands)
        case _, "contract" if _has_terms(plan) and request.out_sharding is None:
            return _run_gemm(plan, *operands)
        case _, "contract":
            precision = for_xla(_precision(request, plan.platform))
            dtype, sharding = request.result_dtype, request.out_sharding
            return reference.contract(
                operation, operands, precision, dtype, plan.platform, sharding
            )
        case _, "reduce":
            return reference.reduce(operation, operands)
    return reference.elementwise(operation, operands)


def _has_terms(plan: Plan) -> bool:
    return plan.gemm is not None and plan.gemm.has_terms


def _run_gemm(plan, a, b, c=None) -> jax.Array:
    operation = plan.problem
    a, b = (UNARY[op](x) for op, x in zip(operation.unary[:2], (a, b), strict=True))
    d = dense_call.dot_general(a, b, plan.gemm)
    alpha, beta, _ = operation.scalars
    return reference.finish_contraction(d, c, alpha, beta, plan.request.result_dtype)


def _call_cutensor(operation: Operation, operands, workspace_bytes: int) -> jax.Array:
    """The custom call of cuTENSOR. C, where there is one, has the result's modes."""
    shape = operation.shape(operation.result)
    results = [jax.ShapeDtypeStruct(shape, operation.dtype)]
    if workspace_bytes:
        total = workspace_bytes + modules.cutensor.workspace_alignment
        results.append(jax.ShapeDtypeStruct((total,), jnp.uint8))
    attributes = operation.attributes(workspace_bytes)
    attributes["abi"] = modules.cutensor.abi_version
    operands = [lax.convert_element_type(x, operation.dtype) for x in operands]
    return jax.ffi.ffi_call("tcgemm_tensor", results)(*operands, **attributes)[0]


def _call_kernel(operation: Operation, a: jax.Array, choice: Choice) -> jax.Array:
    """The custom call of our transposition or reduction."""
    operands = (a, *map(carried, choice.kernels))
    results = [jax.ShapeDtypeStruct(operation.shape(operation.result), operation.dtype)]
    abi = {"abi": modules.cuda.abi_version}
    if operation.kind == "permute":
        attributes = fold_permutation(operation).attributes()
        return jax.ffi.ffi_call("tcgemm_transpose", results)(*operands, **abi, **attributes)[0]
    if choice.workspace_bytes:
        results.append(jax.ShapeDtypeStruct((choice.workspace_bytes,), jnp.uint8))
    attributes = dataclasses.asdict(fold_reduction(operation)) | {"op": operation.combine[0]}
    return jax.ffi.ffi_call("tcgemm_reduce", results)(*operands, **abi, **attributes)[0]
