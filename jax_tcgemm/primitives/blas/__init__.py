"""BLAS calls as one primitive."""

from jax_tcgemm.primitives.blas import cotangents, tangents
from jax_tcgemm.primitives.blas.primitive import DIVIDED, bind, blas_p, product_of

__all__ = ["DIVIDED", "bind", "blas_p", "cotangents", "product_of", "tangents"]
