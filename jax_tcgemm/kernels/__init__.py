"""CUDA kernels compiled for their call: instances, their source text, NVRTC, the cache of cubins.

`compile_kernels` turns each `Instance` into a `Kernel`: from memory, from the cache on disk, or by
NVRTC from the headers that ship with the package. No GPU is needed.
"""

from jax_tcgemm.kernels.compiler import CompileError, compile_kernels, is_compiled
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.kernels.nvrtc import reason

__all__ = ["CompileError", "Instance", "Kernel", "compile_kernels", "is_compiled", "reason"]
