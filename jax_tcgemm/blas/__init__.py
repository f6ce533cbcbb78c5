"""BLAS for JAX: cuBLAS on a GPU, C++ or XLA on the host, behind one primitive.

The functions of BLAS levels 1 to 3 with their options, as JAX expects functions to be: arrays are
row-major, indices count from 0, results are returned and inputs never change. They go through jit,
vmap, grad and shard_map. docs/blas.md shows them at work.
"""

from jax_tcgemm.blas.level1 import amax, amin, asum, axpy, dot, iamax, iamin, nrm2, scal, swap
from jax_tcgemm.blas.level2 import from_band, gbmv, gemv, to_band, trsv
from jax_tcgemm.blas.level3 import gemm, gemm_batched, trsm
from jax_tcgemm.blas.logging import set_logging
from jax_tcgemm.problem.blas_call import Options

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
    "to_band",
    "trsm",
    "trsv",
]
