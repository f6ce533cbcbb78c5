"""Our kernels tensor/transposition and common/reduction: what they run, and the calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import selection
from jax_tcgemm.device.tensor.folding import (
    Reduction,
    Transposition,
    fold_permutation,
    fold_reduction,
)
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.operation import Operation
from jax_tcgemm.system import modules


def reject(operation: Operation) -> str:
    """The rule that stops the kernel for this kind of operation; "" when none does."""
    if 0 in operation.extents:
        return "a mode has extent 0"
    if operation.unary[0] != "identity" or operation.scalars[0] != 1 or len(operation.operands) > 1:
        return "it neither applies operators nor scales nor adds C"
    if operation.kind == "permute":
        folded = fold_permutation(operation)
        if isinstance(folded, str):
            return folded
        attributes = _attributes(folded) | {"element_bytes": operation.dtype.itemsize}
        lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
        return modules.cuda.reject_transposition(lists)
    folded = fold_reduction(operation)
    if isinstance(folded, str):
        return folded
    dtype = DTYPE_NAMES.get(operation.dtype)
    if dtype is None:
        return f"the operand must be f16, bf16, f32 or f64, got {operation.dtype}"
    return modules.cuda.reject_reduction(*_reduction(operation, folded))


def workspace_bytes(operation: Operation, device: selection.Device) -> int:
    """Scratch bytes of the call."""
    if operation.kind == "permute":
        return 0
    arguments = _reduction(operation, fold_reduction(operation))
    return modules.cuda.reduction_workspace_bytes(*arguments, device.num_sms)


def call(operation: Operation, a: jax.Array, num_bytes: int) -> jax.Array:
    """The custom call; `num_bytes` of workspace."""
    results = [jax.ShapeDtypeStruct(operation.shape(operation.result), operation.dtype)]
    abi = {"abi": modules.cuda.abi_version}
    if operation.kind == "permute":
        attributes = _attributes(fold_permutation(operation))
        return jax.ffi.ffi_call("tcgemm_transpose", results)(a, **abi, **attributes)[0]
    if num_bytes:
        results.append(jax.ShapeDtypeStruct((num_bytes,), jnp.uint8))
    attributes = dataclasses.asdict(fold_reduction(operation)) | {"op": operation.combine[0]}
    return jax.ffi.ffi_call("tcgemm_reduce", results)(a, **abi, **attributes)[0]


def _attributes(folded: Transposition) -> dict:
    """The attributes of "tcgemm_transpose" (csrc/ffi/tensor_kernels.h) but their ABI number."""
    return {
        key: np.array(value, np.int64) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(folded).items()
    }


def _reduction(operation: Operation, folded: Reduction) -> tuple:
    dtype = DTYPE_NAMES[operation.dtype]
    return dtype, dtype, operation.combine[0], *dataclasses.astuple(folded)
