"""Tensor-core matrix multiplications for JAX.

`matmul` and `dot_general` are drop-ins for JAX's own. `info()` says what can run here, and
`explain(f, *args)` what runs each of a function's products, and why.
"""

from jax_tcgemm.debug import debug_switches
from jax_tcgemm.dot_general import dot_general
from jax_tcgemm.explain import explain
from jax_tcgemm.info import info
from jax_tcgemm.matmul import matmul

__all__ = ["debug_switches", "dot_general", "explain", "info", "matmul"]
