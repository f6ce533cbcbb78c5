"""Functions of logits that are not stored, for losses over a vocabulary.

    z[t, v] = cap(sum over k of x[t, k] * w[v, k] + bias[v])

or with w[k, v], where t counts the tokens of a chunk. Every pass over z is one product with an
epilogue. Stored arrays have the size of a chunk, and rows that start on 128-byte boundaries, for
which the vocabulary is padded with logits of minus infinity.

"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.losses.how import How, Step
from jax_tcgemm.losses.vocabulary import Vocabulary
from jax_tcgemm.problem.dtypes import wide_dtype


def rows(x) -> jax.Array:
    """Features, possibly zero of them, with the tokens in one dimension."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def logits_of(how: How, acc, bias, offset):
    """Logits from products with the weights, and their derivatives by the products or None."""
    soft_cap, slope = how.soft_cap, None
    z = how.rounded(acc, Step.PRODUCT)
    if bias is not None:
        z = how.rounded(z + bias, Step.BIAS)
    if soft_cap is not None:
        capped = how.rounded(jnp.tanh(how.rounded(z / soft_cap, Step.QUOTIENT)), Step.TANH)
        z, slope = how.rounded(soft_cap * capped, Step.CAP), 1 - capped * capped
    if offset is not None:
        # Without a cap, the offset includes the bias.
        z = z + offset if soft_cap is not None else how.rounded(z + offset, Step.BIAS)
    return z, slope


def with_logits(how: How, x, vocabulary: Vocabulary, function: Callable, operands):
    """Run function(z, slope, *operands) as the epilogue of a chunk's logits; see `logits_of`."""
    addends = vocabulary.bias, vocabulary.offset
    epilogue = _of_logits(how, function, *(a is None for a in addends))
    addends = [a for a in addends if a is not None]
    by_features = ((1,), (1 - how.vocabulary_axis,)), ((), ())
    return how.with_epilogue(x, vocabulary.w, by_features, epilogue, (*addends, *operands))


@functools.lru_cache(maxsize=256)
def _of_logits(how: How, function: Callable, no_bias: bool, no_offset: bool) -> Callable:
    """Epilogue of a function of logits. Cached, so that its trace is cached, too."""

    def epilogue(acc, *operands):
        rest = list(operands)
        bias, offset = (None if absent else rest.pop(0) for absent in (no_bias, no_offset))
        return function(*logits_of(how, acc, bias, offset), *rest)

    return epilogue


class Labels(NamedTuple):
    """Labels of the tokens of a chunk and their logits, as column vectors.

    Attributes:
      columns: index of the label in this device's vocabulary; out of range if the
        label is not there.
      logits: logit of the label; NaN for an invalid label.
      slopes: derivatives of the soft cap at the logits, or None.
    """

    columns: jax.Array
    logits: jax.Array
    slopes: jax.Array | None


def labels_of(how: How, x, w, bias, labels) -> Labels:
    """Compute the logits of the labels, in float32 (float64 for float64), without a GEMM."""
    size, wide = how.size(w), wide_dtype(w.dtype)
    is_label = (labels >= 0) & (labels < size * how.devices)
    if how.axis_name is not None:
        labels = labels - size * lax.axis_index(how.axis_name)
    is_own = (labels >= 0) & (labels < size)
    columns = jnp.where(is_own, labels, np.iinfo(np.int32).max)
    taken = jnp.where(is_own, labels, 0)
    acc = product_with_rows(how, x, w, taken)
    own_bias = None if bias is None else bias[taken].astype(wide)
    z, slopes = logits_of(how, acc, own_bias, None)
    z = jnp.where(is_label, how.total(jnp.where(is_own, z, 0)), jnp.nan)
    return Labels(columns[:, None], z[:, None], None if slopes is None else slopes[:, None])


def product_with_rows(how: How, x, w, taken) -> jax.Array:
    """Product of each token with one entry of the vocabulary, computed by XLA."""
    wide, rows = wide_dtype(w.dtype), jnp.take(w, taken, how.vocabulary_axis)
    return jnp.sum(x.astype(wide) * (rows if how.vocabulary_axis == 0 else rows.T).astype(wide), -1)
