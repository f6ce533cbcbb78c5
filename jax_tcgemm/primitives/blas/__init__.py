"""BLAS calls as one primitive: its call, its rules, its device-local part."""

from jax_tcgemm.primitives.blas import differentiation  # noqa: F401  (registers the rules)
from jax_tcgemm.primitives.blas.call import DEFAULT_OPTIONS, Call, Options, scale_dtype, span
from jax_tcgemm.primitives.blas.local import IMPLEMENTATIONS, check_implementation
from jax_tcgemm.primitives.blas.primitive import bind, blas_p

__all__ = [
    "DEFAULT_OPTIONS",
    "IMPLEMENTATIONS",
    "Call",
    "Options",
    "bind",
    "blas_p",
    "check_implementation",
    "scale_dtype",
    "span",
]
