"""Kernels that a program carries: compiled while it is lowered, run wherever it comes to.

`carried` is an array of one element that a program has as long as it has a call that takes it. In
the program it is the result of a custom call without operands, whose attributes are the kernel's
machine code, and which loads it before the first execution (csrc/ffi/kernel.h). Calls of one block
share it, unless JAX copies what one of them was lowered to (`primitives.lowering`).
"""

import base64
import itertools
import zlib

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.mlir import ir

from jax_tcgemm.kernels.compiler import compile_kernels, start
from jax_tcgemm.kernels.instance import Instance
from jax_tcgemm.system import modules
from jax_tcgemm.system.jax_internals import mlir

TARGET = "tcgemm_kernel"

kernel_p = core.Primitive("tcgemm_kernel")


def carried(instance: Instance) -> jax.Array:
    """What a custom call takes after its operands, of a kernel that the library was not built with.

    The kernel is compiled meanwhile, if need be.
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
    """How many times a kernel was put into a program by this process."""
    return _num_carried


def attributes(instance: Instance) -> dict[str, int | str]:
    """What a program says of a kernel. It is compiled for that, if need be."""
    kernel = compile_kernels([instance])[instance]
    return {
        "abi": modules.cuda.abi_version,
        "headers": modules.cuda.device_headers_hash,
        "name": instance.kernel,
        "target": instance.target,
        "entry": kernel.name,
        "cubin": base64.b64encode(kernel.cubin).decode(),
        "checksum": zlib.crc32(kernel.cubin),
    }


def _lower(ctx, *, instance):
    global _num_carried
    _num_carried += 1
    block = ir.InsertionPoint.current.block
    with ir.InsertionPoint.at_block_begin(block):
        (result,) = _call(ctx, kernel=attributes(instance))
    own = result.owner
    # What follows are the others, then the program, which may be long.
    for other in itertools.islice(block.operations, 1, None):
        if other.name != own.name or other.attributes["call_target_name"].value != TARGET:
            break
        if dict(other.attributes) == dict(own.attributes):
            own.erase()
            return other.results
    return (result,)


_call = jax.ffi.ffi_lowering(TARGET)
mlir.register_lowering(kernel_p, _lower, platform="cuda", cacheable=False)
