"""Softmax of logits, from exponentials in an epilogue or from stored logits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.losses.chunks import by_tokens
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.logits import Labels, with_logits
from jax_tcgemm.losses.vocabulary import Vocabulary
from jax_tcgemm.primitives.rules import same_varying

# Up to this many logits are stored: XLA's loops over stored logits take less time than the kernels
# that avoid storing them. On an H200, losses took 13 to 18 us more than the product alone with
# these kernels (2.4 to 3.9 million logits), and 8 us more with stored logits (1.9 million).
_FEW_LOGITS = 1 << 22
# Exponents are logits minus a shift near the largest logit. Between these bounds, sums over any
# vocabulary and products with weights stay in the range of float32.
_FURTHEST = 60.0
EXPONENTS = -200.0, 80.0


class Softmax(NamedTuple):
    """Exponentials of a chunk's logits and their sums over the vocabulary, as column vectors.

    Attributes:
      stored: exp(z - shift), of shape (tokens, columns), times the derivative of the soft cap if
        there is one; None if not requested.
      shift: a number near the largest logit, usually the logit of the label.
      sums: sums of exp(z - shift).
      moments: sums of (z - shift) * exp(z - shift), or None.
      totals: sums of z, or None.
    """

    stored: jax.Array | None
    shift: jax.Array
    sums: jax.Array
    moments: jax.Array | None
    totals: jax.Array | None

    @property
    def lse(self) -> jax.Array:
        """Logarithm of the sum of the exponentials of the logits."""
        return self.shift + jnp.log(self.sums)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 4, 5, 6))
def softmax(
    how: How, x, vocabulary: Vocabulary, logits, dtype, with_moments: bool, chunks: int
) -> Softmax:
    """Compute the softmax of all logits, in one product for each chunk of tokens.

    Exponents are shifted by the label's logit instead of the row maximum. The label's logit is
    known before the product, and near enough to the maximum unless a token's loss is extreme. If
    the sum of a token's exponentials is out of range, its chunk is computed again with the row
    maximum, in two more products. The check runs once, after all chunks, so that a GPU does not
    wait between chunks.

    Args:
      how: static parameters of the call.
      x: (tokens, k).
      vocabulary: vocabulary of this device.
      logits: logits of the tokens' labels, a column vector.
      dtype: dtype of the stored exponentials; None stores none, and is required for several chunks.
      with_moments: whether to compute moments.
      chunks: number of chunks of tokens.
    """
    usual = _by_chunks(how, x, vocabulary, _finite(logits), dtype, with_moments, chunks)
    is_off = _is_off(usual)

    def mended(x, is_off, usual):
        return _mended(how, x, vocabulary, usual, is_off, dtype, with_moments)

    if chunks == 1:
        return mended(x, is_off, usual)
    return _once(jnp.any(is_off), lambda: by_tokens(mended, chunks, x, is_off, usual), usual)


@softmax.defjvp
def _derivative_of_softmax(how, dtype, with_moments, chunks, primals, tangents):
    """Derivative of `softmax` with its shift as a constant."""
    x, vocabulary, logits = primals
    found = softmax(how, x, vocabulary, logits, dtype, with_moments, chunks)

    def beside(x, vocabulary):
        return _by_chunks(how, x, vocabulary, found.shift, dtype, with_moments, chunks)

    return found, jax.jvp(beside, primals[:2], tangents[:2])[1]


def stores_logits(how: How, tokens: int, w) -> bool:
    """Whether all logits are stored: in batch-invariant calls, and if there are few logits."""
    if how.rows:
        return True
    is_asked = how.options.implementation is not None or how.chunk_bytes is not None
    return how.axis_name is None and not is_asked and tokens * how.size(w) <= _FEW_LOGITS


def softmax_of_stored(
    how: How, x, vocabulary: Vocabulary, labels, size: int, dtype, with_moments: bool
) -> tuple[Labels, Softmax]:
    """Compute the labels' logits and the softmax of a chunk of tokens from stored logits.

    Exponents are shifted by the token's largest logit. Batch-invariant calls add exponentials in
    one order for any number of tokens, as a binary tree.

    Args:
      how: static parameters of the call.
      x: (tokens, k).
      vocabulary: the vocabulary, on one device.
      labels: (tokens,).
      size: number of columns without padding.
      dtype: dtype of the stored exponentials; None stores none.
      with_moments: whether to compute moments.
    """
    if dtype is None:
        z, slope = with_logits(how, x, vocabulary, stored_logits, ()), None
    else:
        z, slope = with_logits(how, x, vocabulary, _logits_and_slopes, ())
    z = how.without_fma(z)
    is_label = ((labels >= 0) & (labels < size))[:, None]
    taken = jnp.where(is_label, labels[:, None], 0)
    columns = jnp.where(is_label, labels[:, None], np.iinfo(np.int32).max)
    label_logits = jnp.where(is_label, jnp.take_along_axis(z, taken, 1), jnp.nan)
    label_slopes = None if slope is None else jnp.take_along_axis(slope, taken, 1)
    shift = _finite(lax.stop_gradient(z.max(-1, keepdims=True)))
    shift = jnp.where(is_label, shift, jnp.nan)
    exponents = jnp.clip(z - shift, *EXPONENTS)
    values = jnp.exp(exponents)
    stored = None
    if dtype is not None:
        stored = (values if slope is None else values * slope).astype(dtype)
    add = _tree_sum if how.rows else functools.partial(jnp.sum, axis=-1, keepdims=True)
    moments = add(how.without_fma(exponents * values)) if with_moments else None
    totals = add(z[:, :size]) if how.label_smoothing else None
    softmax = Softmax(stored, shift, add(values), moments, totals)
    return Labels(columns, label_logits, label_slopes), softmax


def _tree_sum(x: jax.Array) -> jax.Array:
    """Sum each row as a binary tree, whose order depends on the number of columns only."""
    columns = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, (1 << (columns - 1).bit_length()) - columns)))
    while x.shape[1] > 1:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return x


def stored_logits(z, slope):
    """Epilogue that stores the logits."""
    del slope
    return z


def _logits_and_slopes(z, slope):
    return z, slope


def _by_chunks(
    how: How, x, vocabulary: Vocabulary, shift, dtype, with_moments: bool, chunks: int
) -> Softmax:
    def chunk(x, shift):
        return _softmax(how, x, vocabulary, shift, dtype, with_moments)

    return by_tokens(chunk, chunks, x, shift)


def _is_off(usual: Softmax) -> jax.Array:
    """Whether the sum of each token's shifted exponentials is out of range."""
    # False for NaN, which another shift does not change.
    return (usual.sums < np.exp(-_FURTHEST)) | (usual.sums > np.exp(_FURTHEST))


def _mended(how: How, x, vocabulary: Vocabulary, usual: Softmax, is_off, dtype, with_moments: bool):
    """Softmax of a chunk, computed again with the row maximum as shift if any token is off."""

    def beside_largest():
        largest = with_logits(how, x, vocabulary, _largest, ())[:, None]
        if how.axis_name is not None:
            largest = lax.pmax(largest, how.axis_name)
        return _softmax(how, x, vocabulary, _finite(largest), dtype, with_moments)

    return _once(jnp.any(is_off), beside_largest, usual)


def _once(is_asked, function: Callable, otherwise):
    """Return function() if is_asked, else `otherwise`, which has the same types.

    A loop of at most one iteration can reuse the memory of `otherwise`, which `lax.cond` copies.
    """
    found, _ = lax.while_loop(
        lambda state: state[1], lambda state: (function(), state[1] & False), (otherwise, is_asked)
    )
    return found


def _softmax(how: How, x, vocabulary: Vocabulary, shift, dtype, with_moments: bool) -> Softmax:
    """Compute the softmax of a chunk with a given shift."""
    with_totals = how.soft_cap is not None and how.label_smoothing != 0
    function = _exponentials(dtype, with_moments, with_totals)
    shift, _ = same_varying(shift, x)
    found = with_logits(how, x, vocabulary, function, (shift,))
    stored, found = (None, found) if dtype is None else (found[0], found[1:])
    sums, *rest = (how.total(s[:, None]) for s in found)
    moments = rest.pop(0) if with_moments else None
    return Softmax(stored, shift, sums, moments, rest.pop(0) if with_totals else None)


def _finite(x):
    return jnp.where(jnp.isinf(x), 0, x)


@functools.cache
def _exponentials(dtype, with_moments: bool, with_totals: bool) -> Callable:
    def exponentials(z, slope, shift):
        exponents = jnp.clip(z - shift, *EXPONENTS)
        values = jnp.exp(exponents)
        stored = ()
        if dtype is not None:
            stored = ((values if slope is None else values * slope).astype(dtype),)
        sums = [values.sum(-1)]
        if with_moments:
            sums.append((exponents * values).sum(-1))
        if with_totals:
            # Capped logits are finite; padded ones are minus infinity, and count as 0.
            sums.append(jnp.where(z == -jnp.inf, 0, z).sum(-1))
        return *stored, *sums

    return exponentials


def _largest(z, slope):
    del slope
    return z.max(-1)


def mean_logits(how: How, x, vocabulary: Vocabulary, softmax: Softmax, size: int) -> jax.Array:
    """Mean logit of each token over `size` columns per device, as a column vector."""
    if softmax.totals is not None:
        return softmax.totals / (size * how.devices)
    of_weights, of_biases = vocabulary.totals
    totals = jnp.sum(x.astype(of_weights.dtype) * of_weights, -1, keepdims=True) + of_biases
    return how.total(totals) / (size * how.devices)
