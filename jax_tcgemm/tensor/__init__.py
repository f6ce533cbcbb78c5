"""Operations on arrays of any rank by the names of their modes, from contractions to reductions.

On a GPU they run on cuTENSOR (`pip install 'jax_tcgemm[cutensor]'`), on our own matrix products and
kernels, or on XLA, whichever is predicted to be fastest; without a GPU or without cuTENSOR on what
remains. `jax_tcgemm.explain` says what runs, and `implementation=` forces it.
"""

from jax_tcgemm.tensor.contract import contract
from jax_tcgemm.tensor.einsum import einsum
from jax_tcgemm.tensor.elementwise import elementwise_binary, elementwise_trinary, permute
from jax_tcgemm.tensor.plan_cache import plan_cache
from jax_tcgemm.tensor.reduce import reduce

__all__ = [
    "contract",
    "einsum",
    "elementwise_binary",
    "elementwise_trinary",
    "permute",
    "plan_cache",
    "reduce",
]
