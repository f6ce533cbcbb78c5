"""BLAS calls as one primitive: its call, its rules, its device-local part."""

from jax_tcgemm.primitives.blas import cotangents, local, tangents
from jax_tcgemm.primitives.blas.call import DEFAULT_OPTIONS, Call, Options, scale_dtype, span
from jax_tcgemm.primitives.blas.local import IMPLEMENTATIONS, BlasProblem, check_implementation
from jax_tcgemm.primitives.blas.primitive import DIVIDED, bind, blas_p, product_of

__all__ = [
    "DEFAULT_OPTIONS",
    "DIVIDED",
    "IMPLEMENTATIONS",
    "BlasProblem",
    "Call",
    "Options",
    "bind",
    "blas_p",
    "check_implementation",
    "cotangents",
    "local",
    "product_of",
    "scale_dtype",
    "span",
    "tangents",
]
