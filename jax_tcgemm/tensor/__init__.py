"""Operations on arrays of any rank by mode names, from contractions to reductions.

On a GPU, cuTENSOR (`pip install 'jax_tcgemm[cutensor]'`), this library's kernels or XLA run an
operation, whichever has the shortest estimated time. Without a GPU or without cuTENSOR, the
remaining implementations run the operation. `jax_tcgemm.explain` reports the implementation, and
`implementation=` forces one.
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
