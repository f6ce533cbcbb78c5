"""Weighted sums of losses of tokens, whose gradients are made beside them.

    out = sum over t of scales[t] * loss[t]

By chunks of tokens: with P = exp(z - shift) and S its sums, the gradient of the logits is

    scales * (P * (1 + 2 z_loss lse) / S - (1 - smoothing) * [v = label] - smoothing / V)

which is a number for each token times P, once the label's element of P is set to what it has to be,
and an addend of rank one. So P is multiplied as it is, by w and by the tokens, and nothing passes
over it in between.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.products import logits as lg
from jax_tcgemm.products.logits import How
from jax_tcgemm.products.loss_rows import in_chunks, losses_of, token_losses

# Of a chunk; or what a gradient of w in float32 takes, if that is more: one chunk alone needs none.
_CHUNK_BYTES = 1 << 30


def weighted_sum(how: How, recompute: bool, x, w, bias, labels, scales) -> jax.Array:
    """The sum of the tokens' losses times their scales.

    Where devices share the vocabulary it is an addend, of which the sum over them is meant.

    Args:
      how: what the call says.
      recompute: make the logits again for the gradients, as those of single losses are made.
      x: (tokens, k).
      w: (vocabulary of this device, k), or the other way round, of the same dtype.
      bias: None or (vocabulary of this device,).
      labels: (tokens,) int32, among all of the vocabulary.
      scales: (tokens,), of the dtype of losses.
    """
    # With both the part of each column is the slope of its cap, which is of no rank.
    if recompute or (how.soft_cap is not None and how.label_smoothing):
        return _sum_of(scales, token_losses(how, False, x, w, bias, labels)[0])
    return _weighted_sum(how, x, w, bias, labels, scales)


def _sum_of(scales, losses) -> jax.Array:
    """Without what does not count, which may be infinite."""
    return jnp.sum(jnp.where(scales == 0, 0, scales * losses))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(how: How, x, w, bias, labels, scales) -> jax.Array:
    return _sum_of(scales, token_losses(how, False, x, w, bias, labels)[0])


def _forward(how, *primals):
    x, w, bias, labels, scales = (None if p is None else p.value for p in primals)
    moves_x, moves_w, moves_bias = (p is not None and p.perturbed for p in primals[:3])
    dtype, wide = lg.gradient_dtype(w.dtype), wide_dtype(w.dtype)
    size = how.size(w)
    vocabulary = lg.padded(how, w, bias, lg.aligned(size))
    narrow, columns = vocabulary.w.astype(dtype), how.size(vocabulary.w)
    share = how.label_smoothing / (size * how.devices)
    chunks = lg.num_chunks(how, len(x), columns, w.dtype, max(_CHUNK_BYTES, 4 * w.size))

    def chunk(sums, x, labels, scales):
        own = lg.labels_of(how, x, w, bias, labels)
        softmax = lg.softmax(how, x, vocabulary, own, dtype, False)
        losses = losses_of(how, x, vocabulary, own, softmax, size)
        if not (moves_x or moves_w or moves_bias):
            return sums, (losses[:, 0], None)
        factors, gradients = _gradients(how, own, softmax, scales[:, None])
        shares = -share * scales[:, None] if share else None
        dx = None
        if moves_x:
            operands = (factors,) if shares is None else (factors, shares, vocabulary.totals[0])
            epilogue = _scaled(_kept_dtype(x.dtype))
            dx = how.with_epilogue(gradients, narrow, how.by_vocabulary, epilogue, operands)
        dw, db = sums
        if moves_w:
            dw_dtype = _kept_dtype(w.dtype) if chunks == 1 else wide
            wide_x = x.astype(wide)
            if shares is not None:
                alike = jnp.expand_dims(jnp.sum(shares * wide_x, 0), how.vocabulary_axis)
                dw = alike if dw is None else dw + alike
            weighted = (factors * wide_x).astype(dtype)
            dw = how.gradient_of_w(gradients, weighted, dw_dtype, dw)
        if moves_bias:
            own_db = jnp.sum(factors * gradients.astype(wide), 0)
            own_db = own_db if shares is None else own_db + jnp.sum(shares)
            db = own_db if db is None else db + own_db
        return (dw, db), (losses[:, 0], dx)

    if chunks == 1:
        (dw, db), (losses, dx) = chunk((None, None), x, labels, scales)
    else:
        dw = jnp.zeros(vocabulary.w.shape, wide) if moves_w else None
        db = jnp.zeros(columns, wide) if moves_bias else None
        sums = jax.tree.map(lambda a: same_varying(a, *_arrays(primals))[0], (dw, db))
        split = in_chunks(chunks, x, labels, scales)
        (dw, db), (losses, dx) = lax.scan(lambda sums, each: chunk(sums, *each), sums, split)
        losses = losses.reshape(-1)[: len(x)]
        dx = None if dx is None else dx.reshape(-1, x.shape[1])[: len(x)]
    dw = None if dw is None else lax.slice(dw, (0, 0), w.shape).astype(_kept_dtype(w.dtype))
    db = None if db is None else db[:size]
    like = None if bias is None else jnp.zeros((0,), bias.dtype)
    kept = dx, dw, db, losses, (x[:0], w[:0], like)
    return _sum_of(scales, losses) / how.devices, kept


def _arrays(primals):
    return [p.value for p in primals if p is not None]


def _kept_dtype(dtype):
    """What gradients are kept in until the cotangent is known, which may have to scale them up."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _gradients(how: How, labels: lg.Labels, softmax: lg.Softmax, scales):
    """The gradient of a chunk's logits but for the addend of rank one: a column times a matrix."""
    growth = 1 + 2 * how.z_loss * softmax.lse
    if how.z_loss:
        # Only a sum of exponentials near none has it vanish, and the gradient cannot show that.
        growth = jnp.where(abs(growth) < 1e-6, 1e-6, growth)
    factors = scales * growth / softmax.sums
    element = jnp.exp(labels.logits - softmax.shift)
    element = element - (1 - how.label_smoothing) * softmax.sums / growth
    element = element if labels.slopes is None else element * labels.slopes
    rows = jnp.arange(len(element), dtype=jnp.int32)
    at = softmax.stored.at[rows, labels.columns[:, 0]]
    return factors, at.set(
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
