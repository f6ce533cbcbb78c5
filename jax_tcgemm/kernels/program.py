"""Embedded cubins: kernels that are compiled while a program is lowered and travel in it.

`carried` returns an array of one element, which keeps the kernel in the program for as long as a
call takes the array. In the program the array is the result of a custom call without operands. Its
attributes have the cubin, which it loads before the first execution (csrc/ffi/kernel.h). The
program has one such custom call for each kernel, in a function of its own. Calls in one block share
a call of that function, unless JAX copies the lowering of one of them (`primitives.lowering`).
"""

import base64
import hashlib
import itertools

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from jax_tcgemm.kernels.compiler import compile_kernels, start
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.system import modules
from jax_tcgemm.system.jax_internals import mlir, module_function

TARGET = "tcgemm_kernel"

kernel_p = core.Primitive("tcgemm_kernel")


def carried(instance: Instance) -> jax.Array:
    """Return the array that a custom call takes after its operands for a kernel that it runs.

    Compilation of the kernel starts in the background, if necessary.
    """
    start([instance])
    return kernel_p.bind(instance=instance)


@kernel_p.def_abstract_eval
def _abstract_eval(*, instance):
    del instance
    # No product has operands of this type.
    return ShapedArray((1,), np.dtype(bool))


_num_carried = 0


def num_carried() -> int:
    """Return how many times this process has embedded a kernel in a program."""
    return _num_carried


def attributes(instance: Instance) -> dict[str, int | str]:
    """Return the attributes of a kernel's custom call; compile the kernel if necessary."""
    kernel = compile_kernels([instance])[instance]
    return _told_by(instance, kernel) | {"cubin": base64.b64encode(kernel.cubin).decode()}


def _told_by(instance: Instance, kernel: Kernel) -> dict[str, int | str]:
    """Return the attributes without the cubin, which they identify."""
    return {
        "abi": modules.cuda.abi_version,
        "headers": modules.cuda.device_headers_hash,
        "name": instance.kernel,
        "target": instance.target,
        "entry": kernel.name,
        "checksum": kernel.checksum,
    }


def _lower(ctx, *, instance):
    global _num_carried
    _num_carried += 1
    block = ir.InsertionPoint.current.block
    told = _told_by(instance, compile_kernels([instance])[instance])
    name = f"{TARGET}_{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"
    # Calls of kernels come first; what follows is the program, which may be long.
    for other in itertools.takewhile(
        lambda x: x.name == func.CallOp.OPERATION_NAME, block.operations
    ):
        if other.attributes["callee"].value == name:
            return other.results
    types = [ir.RankedTensorType.get((1,), ir.IntegerType.get_signless(1))]
    function = module_function(ctx, name, types, lambda: _call(ctx, kernel=attributes(instance)))
    with ir.InsertionPoint.at_block_begin(block):
        return func.CallOp(function, []).results


_call = jax.ffi.ffi_lowering(TARGET)
mlir.register_lowering(kernel_p, _lower, platform="cuda", cacheable=False)
