"""Selection of the implementation that runs a tensor operation, as a `Choice`.

An implementation named by the caller runs the operation. Otherwise contractions run by the fastest
implementation of the cost model, and all other operations fall back to XLA, which moves memory as
fast and fuses with neighboring operations.
"""

import dataclasses

from jax_tcgemm.kernels import Instance
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.tensor.folding import fold_permutation, fold_reduction
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.selection import contraction_cost, cutensor
from jax_tcgemm.selection.choice import Choice
from jax_tcgemm.selection.contraction_cost import AsProduct
from jax_tcgemm.selection.devices import Device
from jax_tcgemm.selection.implementations import (
    ARGUMENTS,
    IMPLEMENTATIONS_OF,
    XLA,
    XLA_CONFIG,
    Candidate,
    refusal,
)
from jax_tcgemm.system import modules
from jax_tcgemm.system.switches import print_choice


def select_operation(
    options: CallOptions,
    operation: Operation,
    device: Device,
    *,
    product: AsProduct | str = "",
    no_compute: str = "",
    obstacle: str = "",
) -> Choice:
    """Select the implementation that runs a tensor operation.

    Args:
      options: options of the call.
      operation: the operation, with its compute type.
      device: the device that runs the operation.
      product: a contraction as one of our GEMMs; or a phrase saying why it cannot be one.
      no_compute: a phrase saying why cuTENSOR has no compute type for the operation; or "".
      obstacle: a phrase saying why only XLA can run the operation; or "".

    Returns:
      The choice; the config of "gemm" is the implementation and config of the GEMM.

    Raises:
      ValueError: when an implementation was forced that cannot run the operation.
    """
    refusals = {
        "gemm": lambda: _gemm_refusal(product),
        "cutensor": lambda: no_compute or _cutensor_refusal(operation, device),
        "tcgemm": lambda: _kernel_refusal(operation, device),
        XLA: lambda: "",
    }
    considered = tuple(
        Candidate(name, XLA_CONFIG, (name != XLA and obstacle) or refusals[name]())
        for name in _asked(operation, options.implementation)
    )
    if (name := options.implementation) is not None:
        if reason := considered[0].reason:
            raise refusal(options.function, operation.kind, name, reason)
        why = ARGUMENTS.why
    elif obstacle:
        name, why = XLA, obstacle
    elif operation.kind != "contract":
        name, why = XLA, "XLA moves memory as fast, and fuses with its neighbors"
    else:
        name, why = _of_contraction(operation, product, device, considered)
    config, workspace_bytes, kernels = XLA_CONFIG, 0, ()
    if name == "gemm":
        config = f"{product.choice.implementation}/{product.choice.config}"
        workspace_bytes = product.choice.workspace_bytes
    elif name == "cutensor":
        config, workspace_bytes = operation.algorithm, cutensor.estimate(operation)[1]
    elif name == "tcgemm":
        kernels = _kernels(operation, device)
        if operation.kind == "reduce":
            arguments = _reduction(operation)
            workspace_bytes = modules.cuda.reduction_workspace_bytes(*arguments, device.num_sms)
    choice = Choice(name, config, why, workspace_bytes, kernels, considered)
    print_choice(options.function, operation, choice)
    return choice


def _asked(operation: Operation, implementation: str | None) -> tuple[str, ...]:
    """Return the implementations to query; few, since a query to cuTENSOR creates a plan."""
    if implementation is not None:
        return (implementation,)
    return IMPLEMENTATIONS_OF["contract"] if operation.kind == "contract" else (XLA,)


def _of_contraction(
    operation: Operation, product: AsProduct | str, device: Device, considered
) -> tuple[str, str]:
    """Return the implementation selected for a contraction, and the reason."""
    if isinstance(product, str):
        return XLA, product
    if product.multiplies_terms:
        return (
            "gemm",
            f"only this library's GEMMs multiply split-precision terms; {product.choice.why}",
        )
    if device.platform != "cuda":
        return (XLA if _gemm_refusal(product) else "gemm"), product.choice.why
    us = contraction_cost.contraction_us(operation, product, device)
    able = [candidate.implementation for candidate in considered if not candidate.reason]
    better = [n for n in able if n != XLA and contraction_cost.H200.beats_xla(n, us)]
    best = min(better, key=us.get, default=XLA)
    others = ", ".join(f"{us[name]:.4g} us for {name}" for name in able if name != best)
    missing = [candidate.implementation for candidate in considered if candidate.reason]
    why = f"the cost model predicts {us[best]:.4g} us" + (f", {others}" if others else "")
    if missing:
        why += f"; not considered: {', '.join(missing)}"
    return best, why + device.assumption


def _gemm_refusal(product: AsProduct | str) -> str:
    if isinstance(product, str):
        return product
    is_xla = product.choice.implementation == XLA and not product.multiplies_terms
    return product.choice.why if is_xla else ""


def _cutensor_refusal(operation: Operation, device: Device) -> str:
    missing = cutensor.reason()
    if device.platform != "cuda":
        return f"it runs on cuda, not on {device.platform}" + (f"; {missing}" if missing else "")
    return missing or cutensor.reject(operation) or cutensor.estimate(operation)[0]


def _kernel_refusal(operation: Operation, device: Device) -> str:
    """Return why our kernels tensor/transposition and common/reduction cannot run it; or ""."""
    if device.platform != "cuda":
        return f"it runs on cuda, not on {device.platform}"
    if operation.kind not in ("permute", "reduce"):
        return "it has kernels for permute and reduce alone"
    if reason := modules.reason("cuda"):
        return reason
    if 0 in operation.extents:
        return "a mode has extent 0"
    if operation.unary[0] != "identity" or operation.scalars[0] != 1 or len(operation.operands) > 1:
        return "it neither applies operators nor scales nor adds C"
    folded = (fold_permutation if operation.kind == "permute" else fold_reduction)(operation)
    if isinstance(folded, str):
        return folded
    if operation.kind == "permute":
        query = {"element_bytes": operation.dtype.itemsize}
        return modules.cuda.reject_transposition(query | folded.query())
    if operation.dtype not in DTYPE_NAMES:
        return f"the operand must be f16, bf16, f32 or f64, got {operation.dtype}"
    return modules.cuda.reject_reduction(*_reduction(operation))


def _kernels(operation: Operation, device: Device) -> tuple[Instance, ...]:
    """Return the kernels that a program must embed for our transposition or reduction."""
    if operation.kind == "permute":
        query = {"element_bytes": operation.dtype.itemsize}
        query |= fold_permutation(operation).query()
        sources = modules.cuda.transposition_kernels(query, device.query())
    else:
        sources = modules.cuda.reduction_kernels(*_reduction(operation), device.query())
    return tuple(Instance("tcgemm", (header,), *source) for header, *source in sources)


def _reduction(operation: Operation) -> tuple:
    """Return the arguments of the module's queries about reductions."""
    dtype, folded = DTYPE_NAMES[operation.dtype], fold_reduction(operation)
    return dtype, dtype, operation.combine[0], *dataclasses.astuple(folded)
