"""Weights of a vocabulary, padded to aligned rows of logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.losses.how import How
from jax_tcgemm.problem.dtypes import wide_dtype

# The number of columns of a chunk is a multiple of this.
_ALIGNMENT = 64


class Vocabulary(NamedTuple):
    """Padded weights of a vocabulary, and the addends of their products.

    Attributes:
      w: (columns, k), or (k, columns).
      bias: (1, columns), added before the soft cap; None without a bias or a soft cap.
      offset: (1, columns), added after the soft cap; None if it is zero.
      totals: sums of the weights, (1, k), and of the biases, if the mean logit is needed; or None.
    """

    w: jax.Array
    bias: jax.Array | None
    offset: jax.Array | None
    totals: tuple[jax.Array, jax.Array] | None


def padded(how: How, w, bias, columns: int) -> Vocabulary:
    """Pad the vocabulary to a number of columns; the new columns have probability 0."""
    extra, wide = columns - how.size(w), wide_dtype(w.dtype)
    before = None if bias is None else bias.astype(wide)
    after = totals = None
    if how.label_smoothing and how.soft_cap is None:
        sum_of_biases = jnp.zeros((), wide) if bias is None else jnp.sum(before)
        totals = jnp.sum(w.astype(wide), how.vocabulary_axis)[None], sum_of_biases
    if how.soft_cap is None:
        before, after = after, before
    if extra:
        w = jnp.pad(w, [(0, more) for more in how.columns(extra)])
        before = None if before is None else jnp.pad(before, (0, extra))
        after = jnp.zeros(columns - extra, wide) if after is None else after
        after = jnp.pad(after, (0, extra), constant_values=-jnp.inf)
    return Vocabulary(w, *(None if a is None else a[None] for a in (before, after)), totals)


def vocab_chunk(how: How, w, bias, start, size: int) -> Vocabulary:
    """Return `size` columns of the vocabulary, padded to aligned rows of logits."""
    w = lax.dynamic_slice_in_dim(w, start, size, how.vocabulary_axis)
    bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, size)
    return padded(how, w, bias, aligned(size))


def aligned(extent: int) -> int:
    """Number of columns that a vocab chunk is padded to."""
    return -(-extent // _ALIGNMENT) * _ALIGNMENT
