"""BLAS for JAX: cuBLAS on a GPU, C++ or XLA on the host.

The functions of BLAS levels 1 to 3 with their options, as functions of JAX arrays. Arrays are
row-major, indices count from 0, functions return results, and inputs never change. The functions
work in jit, vmap, grad and shard_map. This library's GEMMs run `syrk` and `syr2k`. docs/blas.md
has examples.
"""

from jax_tcgemm.blas.level1 import amax, amin, asum, axpy, dot, iamax, iamin, nrm2, scal, swap
from jax_tcgemm.blas.level2 import from_band, gbmv, gemv, to_band, trsv
from jax_tcgemm.blas.level3 import gemm, gemm_batched, syr2k, syrk, trsm
from jax_tcgemm.blas.logging import set_logging
from jax_tcgemm.problem.blas.call import Options

__all__ = [
    "Options",
    "amax",
    "amin",
    "asum",
    "axpy",
    "dot",
    "from_band",
    "gbmv",
    "gemm",
    "gemm_batched",
    "gemv",
    "iamax",
    "iamin",
    "nrm2",
    "scal",
    "set_logging",
    "swap",
    "syr2k",
    "syrk",
    "to_band",
    "trsm",
    "trsv",
]
