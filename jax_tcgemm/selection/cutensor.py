"""Queries about cuTENSOR: whether it is installed, what it can run, and its workspace size."""

import functools

from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE
from jax_tcgemm.problem.tensor.modes import MAX_MODES
from jax_tcgemm.problem.tensor.operation import Operation
from jax_tcgemm.system import modules

INSTALL = "pip install 'jax_tcgemm[cutensor]'"

# Without a GPU to query, a contraction gets workspace for a permuted copy of every array, up to
# this many bytes.
_MAX_GUESS = 256 << 20


def reason() -> str:
    """Return why cuTENSOR cannot be used here and the command that installs it; or ""."""
    missing = modules.reason("cutensor")
    return f"{missing}; {INSTALL}" if missing else ""


def reject(operation: Operation) -> str:
    """Return the rule that stops cuTENSOR, of those that need no GPU to check; or ""."""
    if operation.dtype not in CONTRACTION_COMPUTE:
        return f"cuTENSOR does not take {operation.dtype}"
    if 0 in operation.extents:
        return "a mode has extent 0"
    if any(len(modes) > MAX_MODES for modes in (*operation.operands, operation.result)):
        return f"an array has over {MAX_MODES} modes"
    if (
        operation.kind == "reduce"
        and operation.combine == ("mul",)
        and operation.dtype.itemsize == 2
    ):
        return f"cuTENSOR rounds products of {operation.dtype} to 16 bits on the way"
    if operation.kind.startswith("elementwise") and operation.operands[-1] != operation.result:
        return "the last operand must have the result's modes, in their order"
    if operation.kind == "contract":
        others = [op for op in operation.unary if op not in ("identity", "conj")]
        if others:
            return f"cuTENSOR contracts with the operators identity and conj, not {others[0]}"
    return ""


@functools.lru_cache(maxsize=4096)
def estimate(operation: Operation) -> tuple[str, int]:
    """Return why cuTENSOR cannot run the operation on this GPU, or "", and its workspace in bytes.

    Without a GPU, as when a program is lowered for another machine, the workspace is the size of
    all arrays, at most 256 MiB. At run time cuTENSOR selects an algorithm that fits into it.
    """
    if modules.cutensor is not None and modules.cuda_device() is not None:
        return modules.cutensor.estimate_workspace(operation.query())
    if operation.kind not in ("contract", "reduce"):
        return "", 0
    return "", min(-(-operation.bytes // 256) * 256, _MAX_GUESS)
