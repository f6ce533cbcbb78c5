"""Elementwise functions of JAX as device code: what happens to a product before it is stored.

`emit` turns a jaxpr of accumulators and operands into an `EpilogueSource`, the C++ text of a struct
and what it reads and gives. No GPU is needed.
"""

from jax_tcgemm.epilogues.code.emitter import emit
from jax_tcgemm.epilogues.code.source import (
    HEADER,
    EpilogueSource,
    InexpressibleError,
    Read,
    Reduction,
    Result,
)

__all__ = [
    "HEADER",
    "EpilogueSource",
    "InexpressibleError",
    "Read",
    "Reduction",
    "Result",
    "emit",
]
