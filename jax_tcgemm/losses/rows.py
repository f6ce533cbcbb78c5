"""Losses of single tokens, whose gradients recompute the logits.

The forward pass runs one product for each chunk of tokens. The backward pass runs three for each
vocab chunk: the gradient of its logits, the gradient of its weights, and an addend of the gradient
of the tokens. Besides the operands, only one or two numbers for each token are stored in between.
Full chunks run in a loop and the rest of the vocabulary after it, so that w is padded and copied
only by chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.losses import logits as lg
from jax_tcgemm.losses import softmax as sm
from jax_tcgemm.losses.chunks import (
    by_tokens,
    gradient_dtype,
    num_chunks,
    num_token_chunks,
    over_vocabulary,
)
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.vocabulary import aligned, padded, vocab_chunk
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype

# Bytes that the logits of a chunk of tokens would take, twice that without entropies; a kernel
# stores only their sums. A chunk of a model's head has enough rows for products at full speed.
_TOKENS_BYTES = 1 << 27
# Bytes of a vocab chunk; at least the bytes of the gradient of x in float32, which is read again
# for each chunk.
_VOCABULARY_BYTES = 224 << 20


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_losses(how: How, with_entropy: bool, x, w, bias, labels) -> tuple[jax.Array, ...]:
    """Loss of each token, its lse, and, if requested, the entropy of its distribution.

        loss = (1 - smoothing) * (lse - z[label]) + smoothing * (lse - mean(z)) + z_loss * lse**2

    If devices share the vocabulary, each returns addends; the results are their sums.

    Args:
      how: static parameters of the call.
      with_entropy: whether to return the entropies.
      x: (tokens, k).
      w: (vocabulary of this device, k), or the other way round, of the same dtype.
      bias: None or (vocabulary of this device,).
      labels: (tokens,) int32, among all of the vocabulary.
    """
    results, _ = _forward(how, with_entropy, x, w, bias, labels)
    return results


def _forward(how, with_entropy, x, w, bias, labels):
    size = how.size(w)
    is_stored = sm.stores_logits(how, len(x), w)
    # Only sums of the logits are stored, so only the rows of the weights need alignment.
    is_aligned = how.rows or (how.vocabulary_axis and not is_stored)
    vocabulary = padded(how, w, bias, aligned(size) if is_aligned else size)

    most = _TOKENS_BYTES if with_entropy else 2 * _TOKENS_BYTES
    chunks = num_token_chunks(how, len(x), how.size(vocabulary.w), w.dtype, most)
    if is_stored:

        def of_stored(x, labels):
            return sm.softmax_of_stored(how, x, vocabulary, labels, size, None, with_entropy)

        token_labels, softmax = by_tokens(of_stored, chunks, x, labels)
    else:
        of_labels = functools.partial(lg.labels_of, how, w=w, bias=bias)
        token_labels = by_tokens(lambda x, labels: of_labels(x, labels=labels), chunks, x, labels)
        softmax = sm.softmax(how, x, vocabulary, token_labels.logits, None, with_entropy, chunks)
    results = [losses_of(how, x, vocabulary, token_labels, softmax, size), softmax.lse]
    if with_entropy:
        results.append(jnp.log(softmax.sums) - softmax.moments / softmax.sums)
    results = [r[:, 0] for r in results]
    kept = x, w, bias, labels, *results[1:]
    # Addends vary over the devices that share the vocabulary, even if they are equal.
    *results, _ = same_varying(*results, x)
    return tuple(r / how.devices for r in results), kept


def losses_of(how: How, x, vocabulary, labels, softmax, size: int) -> jax.Array:
    """Losses of a chunk, as a column vector, with `size` columns of the vocabulary per device."""
    lse, log_sums = softmax.lse, jnp.log(softmax.sums)
    # The shift is usually the label's logit, whose magnitude then costs the loss no digits.
    losses = (softmax.shift - labels.logits) + log_sums
    if how.label_smoothing:
        rest = lse - sm.mean_logits(how, x, vocabulary, softmax, size)
        losses = how.without_fma((1 - how.label_smoothing) * losses)
        losses = losses + how.without_fma(how.label_smoothing * rest)
    return losses + how.without_fma(how.z_loss * lse * lse) if how.z_loss else losses


def _backward(how, with_entropy, kept, cotangents):
    """Gradients of `token_losses`, from the gradient of logits as `Gradient` describes it."""
    x, w, bias, labels, lse, *entropies = kept
    ct, ct_lse, *ct_entropies = cotangents
    growth = 1 + how.without_fma(2 * how.z_loss * lse) if how.z_loss else None
    a = ct + ct_lse if growth is None else how.without_fma(ct * growth) + ct_lse
    b = None
    if with_entropy:
        b = -ct_entropies[0]
        a = a + how.without_fma(b * entropies[0])
    c = (how.label_smoothing - 1) * ct
    d = -how.label_smoothing / (how.size(w) * how.devices) * ct if how.label_smoothing else None
    return *gradients_of(how, x, w, bias, labels, lse, Gradient(a, c, b, d)), None


class Gradient(NamedTuple):
    """Gradient of logits, p (a + b (z - lse)) + c [v = label] + d, with numbers for each token.

    With a soft cap, this is the gradient of the capped logits. None for b or d means 0.
    """

    a: jax.Array
    c: jax.Array
    b: jax.Array | None = None
    d: jax.Array | None = None


def gradients_of(how: How, x, w, bias, labels, lse, gradient: Gradient):
    """Gradients of x, w and bias (None without bias), in three products per vocab chunk."""
    size, axis = how.size(w), how.vocabulary_axis
    columns = [None if n is None else n[:, None] for n in (lse, *gradient)]
    columns = [n for n in columns if n is not None]
    dtype, wide = gradient_dtype(w.dtype), wide_dtype(x.dtype)
    function = _gradients(dtype, gradient.b is not None, gradient.d is not None)
    narrow = x.astype(dtype)
    first = size * (0 if how.axis_name is None else lax.axis_index(how.axis_name))

    def chunk(accumulated, start, extent):
        dx, dw, db = accumulated
        vocabulary = vocab_chunk(how, w, bias, start, extent)
        label_columns = labels[:, None] - first - start
        gradients = lg.with_logits(how, x, vocabulary, function, (label_columns, *columns))
        dx_dtype = x.dtype if dx is None and extent == size else wide
        factor = vocabulary.w.astype(dtype)
        dx = how.product(gradients, factor, how.by_vocabulary, dx_dtype, dx)
        chunk_dw = how.gradient_of_w(gradients, narrow, w.dtype)
        chunk_dw = lax.slice_in_dim(chunk_dw, 0, extent, axis=axis)
        chunk_db = None
        if bias is not None:
            chunk_db = jnp.sum(gradients.astype(wide), 0)[:extent].astype(bias.dtype)
        if extent == size:
            return dx, chunk_dw, chunk_db
        dw = lax.dynamic_update_slice_in_dim(dw, chunk_dw, start, axis)
        db = None if bias is None else lax.dynamic_update_slice_in_dim(db, chunk_db, start, 0)
        return dx, dw, db

    tokens = how.rows or len(x)
    most = max(_VOCABULARY_BYTES, wide.itemsize * tokens * x.shape[1])
    chunks = num_chunks(how, aligned(size), tokens, w.dtype, most)
    extent = min(size, aligned(-(-size // chunks)))
    if extent == size:
        dx, dw, db = chunk((None, None, None), 0, size)
    else:
        zeros = jnp.zeros(x.shape, wide), jnp.zeros(w.shape, w.dtype)
        zeros = *zeros, None if bias is None else jnp.zeros(bias.shape, bias.dtype)
        operands = jax.tree.leaves((x, w, bias, labels, columns))
        zeros = jax.tree.map(lambda a: same_varying(a, *operands)[0], zeros)
        dx, dw, db = over_vocabulary(chunk, zeros, size, extent)
    return dx.astype(x.dtype), dw, db


@functools.cache
def _gradients(dtype, with_entropy: bool, is_smoothed: bool):
    """Epilogue that returns the gradients of the products, in the dtype of the next products."""

    def gradients(z, slope, label, lse, a, c, *rest):
        rest = list(rest)
        exponents = jnp.clip(z - lse, *sm.EXPONENTS)
        factor = a + rest.pop(0) * exponents if with_entropy else a
        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        found = jnp.exp(exponents) * factor + jnp.where(column == label, c, 0)
        if is_smoothed:
            found = found + rest.pop(0)
        return (found if slope is None else found * slope).astype(dtype)

    return gradients


token_losses.defvjp(_forward, _backward)
