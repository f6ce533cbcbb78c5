"""Weighted sums of the losses of tokens, computed together with their gradients.

    out = sum over t of scales[t] * loss[t]

For each chunk of tokens, with P = exp(z - shift) and S its row sums, the gradient of the logits is

    scales * (P * (1 + 2 z_loss lse) / S - (1 - smoothing) * [v = label] - smoothing / V)

which is a number for each token times P, if the label's element of P is replaced, plus a matrix of
rank one. P is therefore multiplied by w and by the tokens as stored, without another pass over P.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.losses import logits as lg
from jax_tcgemm.losses import softmax as sm
from jax_tcgemm.losses.chunks import gradient_dtype, in_chunks, num_token_chunks, together
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.rows import losses_of, token_losses
from jax_tcgemm.losses.vocabulary import aligned, padded
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype

# Of a chunk; or what a gradient of w in float32 takes, if that is more: one chunk alone needs none.
_CHUNK_BYTES = 1 << 30


def weighted_sum(how: How, recompute: bool, x, w, bias, labels, scales) -> jax.Array:
    """Sum of the tokens' losses times their scales.

    If devices share the vocabulary, each returns an addend; the loss is their sum.

    Args:
      how: what the call says.
      recompute: whether to recompute the logits for the gradients, as `token_losses` does.
      x: (tokens, k).
      w: (vocabulary of this device, k), or the other way round, of the same dtype.
      bias: None or (vocabulary of this device,).
      labels: (tokens,) int32, among all of the vocabulary.
      scales: (tokens,), of the dtype of losses.
    """
    # With both, the smoothing term of each column is multiplied by the cap's slope: not rank one.
    if recompute or how.rows or (how.soft_cap is not None and how.label_smoothing):
        return _sum_of(scales, token_losses(how, False, x, w, bias, labels)[0])
    return _weighted_sum(how, x, w, bias, labels, scales)


def _sum_of(scales, losses) -> jax.Array:
    """Sum losses times scales, without losses whose scale is 0, which may be infinite."""
    return jnp.sum(jnp.where(scales == 0, 0, scales * losses))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(how: How, x, w, bias, labels, scales) -> jax.Array:
    return _sum_of(scales, token_losses(how, False, x, w, bias, labels)[0])


def _forward(how, *primals):
    x, w, bias, labels, scales = (None if p is None else p.value for p in primals)
    moves = tuple(p is not None and p.perturbed for p in primals[:3])

    def weigh(chunk_labels, softmax, scales):
        share = how.label_smoothing / (how.size(w) * how.devices)
        return *_weighed(how, chunk_labels, softmax, scales), -share * scales if share else None

    losses, _, *gradients = _with_gradients(how, moves, weigh, x, w, bias, labels, scales)
    like = None if bias is None else jnp.zeros((0,), bias.dtype)
    return _sum_of(scales, losses) / how.devices, (*gradients, losses, (x[:0], w[:0], like))


def losses_and_gradients(how: How, x, w, bias, labels, a, c):
    """Losses of tokens, their lse, and gradients of x, w and bias, in three products.

    Args:
      how: static parameters of the call, without smoothing and sharding.
      x: (tokens, k).
      w: (vocabulary, k), or the other way round.
      bias: None or (vocabulary,).
      labels: (tokens,) int32.
      a: (tokens,): the gradients of the logits are a softmax(z) + c [v = label].
      c: (tokens,).

    Returns:
      Losses, lse, and the gradients in the dtypes of x, w and bias.
    """
    # If a is 0, the label's term remains, and the softmax still needs a nonzero factor.
    a = jnp.where((a == 0) & (c != 0), 1e-6 * c, a)

    def weigh(chunk_labels, softmax, a, c):
        element = jnp.exp(chunk_labels.logits - softmax.shift)
        share = jnp.where(c == 0, 0, c / jnp.where(a == 0, 1, a))
        return a / softmax.sums, element + share * softmax.sums, None

    moves = True, True, bias is not None
    losses, lse, dx, dw, db = _with_gradients(how, moves, weigh, x, w, bias, labels, a, c)
    db = None if bias is None else db.astype(bias.dtype)
    return losses, lse, dx.astype(x.dtype), dw.astype(w.dtype), db


def _with_gradients(how: How, moves, weigh: Callable, x, w, bias, labels, *numbers):
    """Compute losses, lse, and the gradients of x, w and bias; None for gradients not requested.

    Args:
      how: static parameters of the call.
      moves: for x, w and bias, whether its gradient is requested.
      weigh: weigh(labels, softmax, *numbers) of a chunk returns the factors of the exponentials,
        the values that replace the labels' exponentials, and None or the addends of all
        columns, as column vectors.
      x: (tokens, k).
      w: (vocabulary of this device, k), or the other way round.
      bias: None or (vocabulary of this device,).
      labels: (tokens,) int32.
      *numbers: (tokens,) each.
    """
    moves_x, moves_w, moves_bias = moves
    dtype, wide = gradient_dtype(w.dtype), wide_dtype(w.dtype)
    size = how.size(w)
    vocabulary = padded(how, w, bias, aligned(size))
    narrow, columns = vocabulary.w.astype(dtype), how.size(vocabulary.w)
    chunks = num_token_chunks(how, len(x), columns, w.dtype, max(_CHUNK_BYTES, 4 * w.size))

    def chunk(accumulated, x, labels, *numbers):
        if sm.stores_logits(how, len(x), w):
            chunk_labels, softmax = sm.softmax_of_stored(
                how, x, vocabulary, labels, size, dtype, False
            )
        else:
            chunk_labels = lg.labels_of(how, x, w, bias, labels)
            softmax = sm.softmax(how, x, vocabulary, chunk_labels.logits, dtype, False, 1)
        rows = losses_of(how, x, vocabulary, chunk_labels, softmax, size)[:, 0], softmax.lse[:, 0]
        if not any(moves):
            return accumulated, (*rows, None)
        factors, element, shares = weigh(chunk_labels, softmax, *(n[:, None] for n in numbers))
        gradients = _with_labels(chunk_labels, softmax, element)
        dx = None
        if moves_x:
            operands = (factors,) if shares is None else (factors, shares, vocabulary.totals[0])
            epilogue = _scaled(_kept_dtype(x.dtype))
            dx = how.with_epilogue(gradients, narrow, how.by_vocabulary, epilogue, operands)
        dw, db = accumulated
        if moves_w:
            dw_dtype = _kept_dtype(w.dtype) if chunks == 1 else wide
            wide_x = x.astype(wide)
            if shares is not None:
                alike = jnp.expand_dims(jnp.sum(shares * wide_x, 0), how.vocabulary_axis)
                dw = alike if dw is None else dw + alike
            weighted = (factors * wide_x).astype(dtype)
            dw = how.gradient_of_w(gradients, weighted, dw_dtype, dw)
        if moves_bias:
            chunk_db = jnp.sum(factors * gradients.astype(wide), 0)
            chunk_db = chunk_db if shares is None else chunk_db + jnp.sum(shares)
            db = chunk_db if db is None else db + chunk_db
        return (dw, db), (*rows, dx)

    if chunks == 1:
        (dw, db), (losses, lse, dx) = chunk((None, None), x, labels, *numbers)
    else:
        dw = jnp.zeros(vocabulary.w.shape, wide) if moves_w else None
        db = jnp.zeros(columns, wide) if moves_bias else None
        varying = jax.tree.leaves((x, w, bias, labels, numbers))
        zeros = jax.tree.map(lambda a: same_varying(a, *varying)[0], (dw, db))
        split = in_chunks(chunks, x, labels, *numbers)
        (dw, db), rows = lax.scan(lambda found, each: chunk(found, *each), zeros, split)
        losses, lse, dx = together(rows, len(x))
    dw = None if dw is None else lax.slice(dw, (0, 0), w.shape).astype(_kept_dtype(w.dtype))
    return losses, lse, dx, dw, None if db is None else db[:size]


def _kept_dtype(dtype):
    """Dtype of gradients until the cotangent, which may scale them up, is known."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _weighed(how: How, labels: lg.Labels, softmax: sm.Softmax, scales):
    """Return factors of the exponentials, and the values that replace the labels' exponentials."""
    growth = 1 + 2 * how.z_loss * softmax.lse
    if how.z_loss:
        # growth vanishes only if lse is near -1 / (2 z_loss); this bounds the division below.
        growth = jnp.where(abs(growth) < 1e-6, 1e-6, growth)
    element = jnp.exp(labels.logits - softmax.shift)
    element = element - (1 - how.label_smoothing) * softmax.sums / growth
    return scales * growth / softmax.sums, element


def _with_labels(labels: lg.Labels, softmax: sm.Softmax, element) -> jax.Array:
    """Exponentials of a chunk with `element` at the labels, times the slopes of the soft cap."""
    element = element if labels.slopes is None else element * labels.slopes
    rows = jnp.arange(len(element), dtype=jnp.int32)
    return softmax.stored.at[rows, labels.columns[:, 0]].set(
        element[:, 0].astype(softmax.stored.dtype),
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
    )


@functools.cache
def _scaled(dtype):
    def scaled(acc, factors, *rest):
        out = acc * factors
        if rest:
            shares, totals = rest
            out = out + shares * totals
        return out.astype(dtype)

    return scaled


def _backward(how, kept, cotangent):
    *gradients, losses, like = kept
    found = [
        None if g is None else (cotangent * g.astype(cotangent.dtype)).astype(of.dtype)
        for g, of in zip(gradients, like, strict=True)
    ]
    return *found, None, cotangent * losses / how.devices


_weighted_sum.defvjp(_forward, _backward, symbolic_zeros=True)
