"""cuTENSOR: what it can run, how much workspace it wants, and the call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE
from jax_tcgemm.problem.modes import MAX_MODES
from jax_tcgemm.problem.operation import Operation
from jax_tcgemm.system import modules

TARGET = "tcgemm_tensor"
INSTALL = "pip install 'jax_tcgemm[cutensor]'"

# Compute types of everything but contractions.
ELEMENTWISE_COMPUTE = {
    np.dtype(jnp.float16): ("f32", "f16"),
    np.dtype(jnp.bfloat16): ("f32", "bf16"),
    np.dtype(jnp.float32): ("f32",),
    np.dtype(jnp.float64): ("f64",),
    np.dtype(jnp.complex64): ("f32",),
    np.dtype(jnp.complex128): ("f64",),
}

# Where no GPU is there to ask, a contraction gets room for a permuted copy of every array, up to
# this.
_MAX_GUESS = 256 << 20


def reason() -> str:
    """Why cuTENSOR cannot be used here, with what to install, or ""."""
    missing = modules.reason("cutensor")
    return f"{missing}; {INSTALL}" if missing else ""


def version() -> str:
    """The version of the library, such as 2.8.1; "" where it cannot be used."""
    if modules.reason("cutensor"):
        return ""
    number = modules.cutensor.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def reject(operation: Operation) -> str:
    """The rule, of those that need no GPU to know, that stops cuTENSOR; "" when none does."""
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
    """Why cuTENSOR cannot run the operation on this GPU, or ""; and the workspace for it.

    Where there is no GPU, as when a program is lowered for one elsewhere, the workspace is a bound:
    as many bytes as all the arrays have, at most 256 MiB. cuTENSOR then takes the best algorithm
    that it is enough for.
    """
    if modules.cutensor is not None and modules.cuda_device() is not None:
        return modules.cutensor.estimate_workspace(operation.query())
    if operation.kind not in ("contract", "reduce"):
        return "", 0
    return "", min(-(-operation.bytes // 256) * 256, _MAX_GUESS)


def call(operation: Operation, operands, workspace_bytes: int) -> jax.Array:
    """The custom call. C, where there is one, has the result's modes."""
    shape = operation.shape(operation.result)
    results = [jax.ShapeDtypeStruct(shape, operation.dtype)]
    if workspace_bytes:
        total = workspace_bytes + modules.cutensor.workspace_alignment
        results.append(jax.ShapeDtypeStruct((total,), jnp.uint8))
    attributes = operation.attributes(workspace_bytes)
    attributes["abi"] = modules.cutensor.abi_version
    operands = [lax.convert_element_type(x, operation.dtype) for x in operands]
    return jax.ffi.ffi_call(TARGET, results)(*operands, **attributes)[0]


def plan_cache() -> dict[str, int]:
    """Hits, misses, evictions and size of the cache of plans; all 0 without cuTENSOR."""
    if modules.cutensor is None:
        return dict.fromkeys(("hits", "misses", "evictions", "size", "capacity"), 0)
    return modules.cutensor.plan_cache() | {"capacity": modules.cutensor.max_plans}
