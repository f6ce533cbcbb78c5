"""Losses of tokens, each by itself: their gradients make the logits again.

Forwards, chunks of tokens take one product each. Backwards, chunks of the vocabulary do: of each
the gradient of its logits is made in one product, and then the gradient of its weights and an
addend of that of the tokens are one more each. Beside the operands only a number or two for each
token are kept in between.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.products import logits as lg
from jax_tcgemm.products.logits import How

# Of a chunk: that of a model's head has then rows or columns enough for products at full speed.
_CHUNK_BYTES = 1 << 28


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_losses(how: How, with_entropy: bool, x, w, bias, labels) -> tuple[jax.Array, ...]:
    """The loss of each token and, if asked for, the entropy of its distribution.

        loss = (1 - smoothing) * (lse - z[label]) + smoothing * (lse - mean(z)) + z_loss * lse**2

    Where devices share the vocabulary these are addends, of which the sum over them is meant.

    Args:
      how: what the call says.
      with_entropy: whether the second result is asked for.
      x: (tokens, k).
      w: (vocabulary of this device, k), of the same dtype.
      bias: None or (vocabulary of this device,).
      labels: (tokens,) int32, among all of the vocabulary.
    """
    results, _ = _forward(how, with_entropy, x, w, bias, labels)
    return results


def _forward(how, with_entropy, x, w, bias, labels):
    vocabulary = lg.padded(how, w, bias, lg.aligned(len(w)))

    def chunk(x, labels):
        own = lg.labels_of(how, x, w, bias, labels)
        softmax = lg.softmax(how, x, vocabulary, own, None, with_entropy)
        found = [losses_of(how, x, vocabulary, own, softmax, len(w))]
        if with_entropy:
            found.append(jnp.log(softmax.sums) - softmax.moments / softmax.sums)
        return [f[:, 0] for f in (*found, softmax.lse)]

    chunks = lg.num_chunks(how, len(x), len(vocabulary.w), w.dtype, _CHUNK_BYTES)
    *results, lse = by_tokens(chunk, chunks, x, labels)
    kept = x, w, bias, labels, lse, *results[1:]
    # Addends vary over the devices that share the vocabulary, also where all have the same one.
    *results, _ = same_varying(*results, x)
    return tuple(r / how.devices for r in results), kept


def losses_of(how: How, x, vocabulary, labels, softmax, size: int) -> jax.Array:
    """The losses of a chunk, as a column, with `size` columns of the vocabulary on a device."""
    lse, log_sums = softmax.lse, jnp.log(softmax.sums)
    # As a rule the shift is the label's logit, whose size then costs the loss no digits.
    losses = (softmax.shift - labels.logits) + log_sums
    if how.label_smoothing:
        rest = lse - lg.mean_logits(how, x, vocabulary, softmax, size)
        losses = (1 - how.label_smoothing) * losses + how.label_smoothing * rest
    return losses + how.z_loss * lse * lse if how.z_loss else losses


def by_tokens(function, chunks: int, *arrays) -> list[jax.Array]:
    """What a function makes of chunks of tokens, together; of none more than the first has."""
    if chunks == 1:
        return function(*arrays)
    tokens, split = len(arrays[0]), in_chunks(chunks, *arrays)
    _, found = lax.scan(lambda _, each: (None, function(*each)), None, split)
    return [f.reshape(-1, *f.shape[2:])[:tokens] for f in found]


def in_chunks(chunks: int, *arrays) -> list[jax.Array]:
    """Arrays with a new first dimension, of chunks; the last ones are filled up with zeros."""
    size = -(-len(arrays[0]) // chunks)
    padding = chunks * size - len(arrays[0])
    widths = [((0, padding), *[(0, 0)] * (a.ndim - 1)) for a in arrays]
    padded = [jnp.pad(a, width) if padding else a for a, width in zip(arrays, widths, strict=True)]
    return [a.reshape(chunks, size, *a.shape[1:]) for a in padded]


def _backward(how, with_entropy, kept, cotangents):
    """The gradients: of logits, p (a + b (z - lse)) + c [v = label] + d, times the cap's slope."""
    x, w, bias, labels, lse, *entropies = kept
    ct, *ct_entropies = cotangents
    a = ct * (1 + 2 * how.z_loss * lse) if how.z_loss else ct
    b = None
    if with_entropy:
        b = -ct_entropies[0]
        a = a + b * entropies[0]
    c = (how.label_smoothing - 1) * ct
    d = -how.label_smoothing / (len(w) * how.devices) * ct if how.label_smoothing else None
    columns = [None if n is None else n[:, None] for n in (lse, a, c, b, d)]
    columns = [n for n in columns if n is not None]
    dtype = lg.gradient_dtype(w.dtype)
    function = _gradients(dtype, with_entropy, bool(how.label_smoothing))
    narrow = x.astype(dtype)

    chunks = lg.num_chunks(how, lg.aligned(len(w)), len(x), w.dtype, _CHUNK_BYTES)
    size = lg.aligned(-(-len(w) // chunks))
    chunks = -(-len(w) // size)
    vocabulary = lg.padded(how, w, bias, chunks * size)._replace(totals=None)
    first = len(w) * (0 if how.axis_name is None else lax.axis_index(how.axis_name))

    def chunk(dx, part, number):
        own = labels[:, None] - first - number * size
        gradients = lg.with_logits(how, x, part, function, (own, *columns))
        dx_dtype = x.dtype if chunks == 1 else wide_dtype(x.dtype)
        dx = how.product(gradients, part.w.astype(dtype), lg.ROWS_BY_COLUMNS, dx_dtype, dx)
        dw = how.product(gradients, narrow, lg.COLUMNS_BY_COLUMNS, w.dtype)
        db = None if bias is None else jnp.sum(gradients.astype(wide_dtype(dtype)), 0)
        return dx, (dw, db)

    if chunks == 1:
        dx, (dw, db) = chunk(None, vocabulary, 0)
    else:
        (dx,) = same_varying(jnp.zeros(x.shape, wide_dtype(x.dtype)), *jax.tree.leaves(kept))[:1]
        parts = _parts(vocabulary, chunks), jnp.arange(chunks, dtype=jnp.int32)
        dx, (dw, db) = lax.scan(lambda dx, each: chunk(dx, *each), dx, parts)
        dw = dw.reshape(-1, dw.shape[-1])
    db = None if bias is None else db.reshape(-1)[: len(w)].astype(bias.dtype)
    return dx.astype(x.dtype), dw[: len(w)], db, None


def _parts(vocabulary: lg.Vocabulary, chunks: int) -> lg.Vocabulary:
    """Chunks of a vocabulary along a new first dimension."""
    w = vocabulary.w.reshape(chunks, -1, vocabulary.w.shape[-1])
    addends = vocabulary.bias, vocabulary.offset
    addends = (None if a is None else a.reshape(chunks, 1, -1) for a in addends)
    return lg.Vocabulary(w, *addends, None)


@functools.cache
def _gradients(dtype, with_entropy: bool, is_smoothed: bool):
    """The gradients of logits by the product, in the dtype that they are multiplied in."""

    def gradients(z, slope, label, lse, a, c, *rest):
        rest = list(rest)
        exponents = jnp.clip(z - lse, *lg.EXPONENTS)
        factor = a + rest.pop(0) * exponents if with_entropy else a
        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        found = jnp.exp(exponents) * factor + jnp.where(column == label, c, 0)
        if is_smoothed:
            found = found + rest.pop(0)
        return (found if slope is None else found * slope).astype(dtype)

    return gradients


token_losses.defvjp(_forward, _backward)
