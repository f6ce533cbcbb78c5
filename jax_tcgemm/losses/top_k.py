"""Public `linear_top_k`: the largest logits of a vocabulary, without storing all logits."""

import functools
from collections.abc import Callable
from operator import index

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_tcgemm.losses import logits as lg
from jax_tcgemm.losses import softmax as sm
from jax_tcgemm.losses.arguments import (
    canonical_axis,
    canonical_bytes,
    canonical_cap,
    checked_operands,
    manual_axes,
)
from jax_tcgemm.losses.chunks import by_tokens, num_chunks, num_token_chunks, over_vocabulary
from jax_tcgemm.losses.divisions import check_undivided
from jax_tcgemm.losses.how import How
from jax_tcgemm.losses.vocabulary import aligned, vocab_chunk
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import call_options

# Bytes of a chunk's logits, and its least number of columns, for products at full speed.
_CHUNK_BYTES = 1 << 28
_LEAST_COLUMNS = 4096


def linear_top_k(
    x,
    w,
    k: int,
    *,
    bias=None,
    soft_cap: float | None = None,
    vocabulary_axis: int = 0,
    axis_name=None,
    chunk_bytes: int | None = None,
    precision=None,
    implementation: str | None = None,
    batch_invariant: bool | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Largest logits of a linear layer and their indices, without storing all logits.

        z[..., v] = sum over d of x[..., d] * w[v, d] + bias[v]
        z = soft_cap * tanh(z / soft_cap), if there is a soft_cap
        values, indices = jax.lax.top_k(z, k)

    The results serve sampling and the targets of a distillation. The vocabulary is processed in
    chunks; the largest logits of each chunk are merged with the largest logits of previous chunks.

    Args:
      x: array of shape (..., d), of float16, bfloat16, float32 or float64.
      w: array of shape (vocabulary, d), or (d, vocabulary) with vocabulary_axis=1.
      k: number of logits to return, from 1 to the size of the vocabulary.
      bias: None, or an array of shape (vocabulary,); see `linear_cross_entropy`.
      soft_cap: None, or the bound of the magnitude of logits; see `linear_cross_entropy`.
      vocabulary_axis: the vocabulary dimension of w; see `linear_cross_entropy`.
      axis_name: mesh axes over which the vocabulary is sharded; see `linear_cross_entropy`. k and
        the indices refer to the whole vocabulary. Devices exchange their k largest logits.
      chunk_bytes: bound on the stored logits at a time, in float32 (float64 for float64). None
        selects 1/4 GiB. A chunk has at least k columns.
      precision: precision of the products; see `matmul`.
      implementation: name of an implementation; see `matmul`.
      batch_invariant: whether the values and indices of a token are bit-equal whatever other tokens
        there are; see `matmul`. Derivatives are not batch-invariant; on a CPU, a soft_cap is not,
        either.

    Returns:
      The values in descending order, of shape (..., k), in float32 (float64 for float64), and the
      indices, in int32. Equal logits are ordered by index. NaN counts as larger than all numbers,
      as in `jax.lax.top_k`.

    Raises:
      TypeError: if operands have other dtypes.
      ValueError: if shapes do not match, k or another number is out of range, an implementation is
        unknown, an axis is not a manual axis here, or operands are sharded over explicit mesh axes.

    Numerics:
      Logits accumulate as in `matmul` and are not rounded. The derivatives of the values with
      respect to x, w and bias are the derivatives of the selected logits, computed from rows of w
      in float32 (float64 for float64). Indices have no derivatives.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> x, w = jnp.eye(2, 4), jnp.array([[1.0, 5], [3, 2], [2, 5]]).repeat(2, 1)
      >>> values, indices = jax_tcgemm.linear_top_k(x, w, 2)
      >>> values.tolist(), indices.tolist()
      ([[3.0, 2.0], [3.0, 2.0]], [[1, 2], [1, 2]])
    """
    op = "linear_top_k"
    axis = canonical_axis(op, vocabulary_axis)
    x, w, bias = checked_operands(op, x, w, bias, axis)
    check_undivided(op, x=x, w=w, bias=bias)
    axes = manual_axes(op, "axis_name", axis_name)
    how = How(
        call_options(op, implementation, None, batch_invariant),
        soft_cap=canonical_cap(op, soft_cap),
        label_smoothing=0.0,
        z_loss=0.0,
        axis_name=axes or None,
        chunk_bytes=canonical_bytes(op, chunk_bytes),
        precision=canonical_precision(op, precision),
        vocabulary_axis=axis,
    )
    k = _canonical_k(op, k, how.size(w) * how.devices)
    operands = [a for a in (lg.rows(x), w, bias) if a is not None]
    operands = [*same_varying(*operands, over=axes), *([None] if bias is None else [])]
    values, indices = _top_k(how, k, *lax.stop_gradient(operands))
    values = _with_derivatives(how, *operands, values, indices)
    return tuple(a.reshape(*x.shape[:-1], k) for a in (values, indices))


def _canonical_k(op: str, k, size: int) -> int:
    try:
        number = index(k)
    except TypeError:
        raise TypeError(
            f"{op}: k must be an integer, got k of type {type(k).__name__}; it is part of the "
            "program"
        ) from None
    if not 1 <= number <= size or isinstance(k, bool):
        raise ValueError(
            f"{op}: k must be from 1 up to the vocabulary, {size}, got {k=}; take fewer"
        )
    return number


def _top_k(how: How, k: int, x, w, bias) -> tuple[jax.Array, jax.Array]:
    chunks = num_token_chunks(
        how, len(x), max(_LEAST_COLUMNS, k), wide_dtype(x.dtype), _CHUNK_BYTES
    )
    local_k = min(k, how.size(w))
    found = by_tokens(lambda x: _of_chunk(how, local_k, x, w, bias), chunks, x)
    return tuple(found if how.axis_name is None else _of_devices(how, k, w, *found))


def _of_devices(how: How, k: int, w, values, indices) -> list[jax.Array]:
    """Merge the largest logits of all devices that share the vocabulary."""
    place = lax.axis_index(how.axis_name)

    def together(local, nothing):
        # In the order of the devices, so that lower indices come first.
        everyone = jnp.full((how.devices, *local.shape), nothing, local.dtype)
        everyone, _ = same_varying(everyone, local)
        found = how.total(lax.dynamic_update_index_in_dim(everyone, local, place, 0))
        return jnp.moveaxis(found, 0, 1).reshape(len(local), how.devices * local.shape[1])

    # Adding -0.0 changes no value, not even the sign of a zero.
    values = together(values, -0.0)
    indices = together(indices + how.size(w) * place, 0)
    values, places = lax.top_k(values, k)
    return [values, jnp.take_along_axis(indices, places, 1)]


def _of_chunk(how: How, k: int, x, w, bias) -> list[jax.Array]:
    """Largest logits and their indices of a chunk of tokens, by vocab chunks."""

    def largest(z):
        values, indices = lax.top_k(z, min(k, z.shape[1]))
        return values, indices.astype(jnp.int32)

    def merge(found, more):
        # Lower indices first, so that equal values stay ordered by index.
        values, indices = (lax.concatenate(pair, 1) for pair in zip(found, more, strict=True))
        values, places = lax.top_k(values, k)
        return values, jnp.take_along_axis(indices, places, 1)

    return list(_over_logits(how, largest, merge, k, x, w, bias))


def _over_logits(how: How, function: Callable, merge: Callable, least: int, x, w, bias):
    """Reduce the logits of a chunk of tokens to values and indices, by vocab chunks.

    Args:
      how: static parameters of the call.
      function: function(z) returns values and indices of the logits of a vocab chunk.
      merge: merge(found, more) merges two results; the indices of `found` are lower.
      least: least number of columns of a vocab chunk, if the vocabulary has as many.
      x: (tokens, k).
      w: (vocabulary of this device, k), or the other way round.
      bias: None or (vocabulary of this device,).
    """
    size = how.size(w)
    tokens = how.rows or max(1, len(x))
    chunks = num_chunks(how, size, tokens, wide_dtype(x.dtype), _CHUNK_BYTES)
    extent = min(size, aligned(max(least, -(-size // chunks))))

    def of_chunk(start, extent):
        vocabulary = vocab_chunk(how, w, bias, start, extent)
        z = lg.with_logits(how, x, vocabulary, sm.stored_logits, ())[:, :extent]
        values, places = function(z)
        return values, places + start

    def with_chunk(found, start, extent):
        return merge(found, of_chunk(start, extent))

    return over_vocabulary(with_chunk, of_chunk(0, extent), size, extent, first=1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivatives(how: How, x, w, bias, values, indices) -> jax.Array:
    """The values, with the derivatives of the logits at the indices."""
    del how, x, w, bias, indices
    return values


@functools.partial(_with_derivatives.defjvp, symbolic_zeros=True)
def _derivative(how: How, primals, tangents):
    x, w, _, _, indices = primals
    values = _with_derivatives(how, *primals)  # the slope of a cap has a derivative, too
    dx, dw, db = (None if t is None or type(t) is SymbolicZero else t for t in tangents[:3])
    wide, size = wide_dtype(x.dtype), how.size(w)
    first = 0 if how.axis_name is None else size * lax.axis_index(how.axis_name)

    def of_columns(columns):
        """Derivatives of some of the k logits of each token, (columns, tokens)."""
        columns = columns - first
        is_here = (columns >= 0) & (columns < size)
        columns = jnp.where(is_here, columns, 0)
        found = jnp.zeros(columns.shape, wide)
        for features, weights in ((dx, w), (x, dw)):
            if features is not None and weights is not None:
                rows = jnp.take(weights, columns, how.vocabulary_axis)
                if how.vocabulary_axis == 1:
                    rows = jnp.moveaxis(rows, 0, -1)
                found += jnp.sum(features.astype(wide) * rows.astype(wide), -1)
        found = found if db is None else found + db[columns].astype(wide)
        return how.total(jnp.where(is_here, found, 0))

    # As many of the k at once as the gathered rows of w fit into a chunk.
    most = max(1, (how.chunk_bytes or _CHUNK_BYTES) // max(1, x.size * wide.itemsize))
    chunks = [indices.T[i : i + most] for i in range(0, values.shape[1], most)]
    whole = len(chunks) - (len(chunks[-1]) != most)
    found = [of_columns(chunk) for chunk in chunks[whole:]]
    if whole:
        of_whole = lax.map(of_columns, jnp.stack(chunks[:whole]))
        found = [of_whole.reshape(whole * most, len(x)), *found]
    found = jnp.concatenate(found).T
    if how.soft_cap is not None:
        found = found * (1 - jnp.square(values / how.soft_cap))
    return values, found


# --- the largest one ------------------------------------------------------------------------------


def argmax_of_logits(how: How, x, w, bias) -> jax.Array:
    """Index of each token's largest logit, as `jnp.argmax` returns it: the first, or a NaN.

    Args:
      how: static parameters of the call.
      x: (tokens, k).
      w: (vocabulary, k), or the other way round.
      bias: None or (vocabulary,).
    """
    x, w, bias = lax.stop_gradient((x, w, bias))

    def largest(z):
        places = lax.argmax(z, 1, jnp.int32)
        return jnp.take_along_axis(z, places[:, None], 1)[:, 0], places

    def merge(found, more):
        is_more = (more[0] > found[0]) | (jnp.isnan(more[0]) & ~jnp.isnan(found[0]))
        return tuple(jnp.where(is_more, b, a) for a, b in zip(found, more, strict=True))

    def chunk(x):
        return _over_logits(how, largest, merge, 1, x, w, bias)[1]

    chunks = num_token_chunks(how, len(x), _LEAST_COLUMNS, wide_dtype(x.dtype), _CHUNK_BYTES)
    return by_tokens(chunk, chunks, x)
