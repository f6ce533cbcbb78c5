"""Functions of logits that are not stored, for losses over a vocabulary.

    z[t, v] = cap(sum over k of x[t, k] * w[v, k] + bias[v])

or with w[k, v], where t counts the tokens of a chunk. Every pass over z is one product with an
epilogue. Stored arrays have the size of a chunk, and rows that start on 128-byte boundaries, for
which the vocabulary is padded with logits of minus infinity.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.products.epilogue import with_epilogue
from jax_tcgemm.products.linear import product

_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))

# The number of columns of a chunk is a multiple of this.
_ALIGNMENT = 64
# Up to this many logits are stored: XLA's loops over stored logits take less time than the kernels
# that avoid storing them. On an H200, losses took 13 to 18 us more than the product alone with
# these kernels (2.4 to 3.9 million logits), and 8 us more with stored logits (1.9 million).
_FEW_LOGITS = 1 << 22
# Exponents are logits minus a shift near the largest logit. Between these bounds, sums over any
# vocabulary and products with weights stay in the range of float32.
_FURTHEST = 60.0
EXPONENTS = -200.0, 80.0


class Step(enum.IntEnum):
    """The steps to a logit, in their order."""

    PRODUCT, BIAS, QUOTIENT, TANH, CAP = range(5)


@dataclasses.dataclass(frozen=True)
class How:
    """Static parameters of a call.

    Attributes:
      options: options of the call.
      soft_cap: bound of the magnitude of logits, by a hyperbolic tangent; None for no bound.
      label_smoothing: fraction of the target that is spread over the vocabulary.
      z_loss: factor of the squared logarithm of the sum of exponentials.
      axis_name: the manual mesh axis or axes that shard the vocabulary, or None.
      chunk_bytes: bound on the stored logits at a time; None for the default of `num_chunks`.
      precision: as for `matmul`.
      vocabulary_axis: the vocabulary dimension of w, 0 or 1.
      rounded_to: None, or a dtype to which steps are rounded, as if their arrays had this dtype.
      last_rounded: the last step that is rounded.
    """

    options: CallOptions
    soft_cap: float | None
    label_smoothing: float
    z_loss: float
    axis_name: str | tuple[str, ...] | None
    chunk_bytes: int | None
    precision: object = None
    vocabulary_axis: int = 0
    rounded_to: np.dtype | None = None
    last_rounded: Step = Step.PRODUCT

    @property
    def rows(self) -> int:
        """Number of tokens that determines every choice of a batch-invariant call; else 0."""
        return self.options.invariant_rows

    def without_fma(self, x: jax.Array) -> jax.Array:
        """Keep XLA from contracting a product with a sum into one rounding (FMA)."""
        return lax.optimization_barrier(x) if self.rows else x

    def size(self, w) -> int:
        """Size of a device's vocabulary."""
        return w.shape[self.vocabulary_axis]

    def columns(self, extent: int) -> tuple[int, int]:
        """Return a number per dimension of w: `extent` for the vocabulary and 0 for the other."""
        return (extent, 0) if self.vocabulary_axis == 0 else (0, extent)

    def rounded(self, z: jax.Array, step: Step) -> jax.Array:
        """Round the result of a step, if the call rounds this step."""
        if self.rounded_to is None or step > self.last_rounded:
            return z
        finfo = jnp.finfo(self.rounded_to)
        return lax.reduce_precision(z, finfo.nexp, finfo.nmant)

    @property
    def devices(self) -> int:
        """Number of devices that share the vocabulary."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share the vocabulary."""
        return x if self.axis_name is None else lax.psum(x, self.axis_name)

    @property
    def by_vocabulary(self):
        """Dimension numbers of a product of (tokens, vocabulary) with w."""
        return ((1,), (self.vocabulary_axis,)), ((), ())

    def gradient_of_w(self, gradients, x, dtype, residual=None) -> jax.Array:
        """Product of gradients of logits and x over the tokens, in the layout of w."""
        pair = (gradients, x) if self.vocabulary_axis == 0 else (x, gradients)
        return self.product(*pair, _COLUMNS_BY_COLUMNS, dtype, residual)

    def product(self, lhs, rhs, dimension_numbers, dtype, residual=None) -> jax.Array:
        """Product without an epilogue, to which a residual is added in place."""
        return product(
            self.options,
            lhs,
            rhs,
            dimension_numbers=dimension_numbers,
            residual=residual,
            donate_residual=residual is not None,
            preferred_element_type=np.dtype(dtype),
            precision=self.precision,
        )

    def with_epilogue(self, lhs, rhs, dimension_numbers, epilogue, operands):
        """Product with an epilogue."""
        return with_epilogue(
            self.options,
            lhs,
            rhs,
            epilogue,
            operands,
            dimension_numbers=dimension_numbers,
            precision=self.precision,
        )


def gradient_dtype(dtype) -> np.dtype:
    """Dtype for gradients of logits; not float16, which lacks the range of exponentials."""
    return np.dtype(jnp.bfloat16) if dtype == jnp.float16 else np.dtype(dtype)


def num_chunks(how: How, extent: int, other: int, dtype, most: int) -> int:
    """Number of chunks of one dimension of the logits, whose slices have `other` elements.

    Gradients of the logits of a chunk take at most `how.chunk_bytes` or else `most` bytes.
    """
    most = how.chunk_bytes or most
    slice_bytes = other * gradient_dtype(dtype).itemsize
    return max(1, -(-extent // max(1, most // max(1, slice_bytes))))


def num_token_chunks(how: How, tokens: int, other: int, dtype, most: int) -> int:
    """Number of chunks of tokens: `num_chunks`, or up to twice as many that divide the tokens.

    If none divides the tokens, the last chunk is padded, which copies all tokens.
    """
    least = num_chunks(how, tokens, other, dtype, most)
    return next((n for n in range(least, 2 * least) if tokens % n == 0), least)


def over_vocabulary(function: Callable, found, size: int, extent: int, first: int = 0):
    """Fold a function over vocab chunks: found = function(found, start, extent).

    Full chunks run in a loop, from chunk number `first` on. The rest of the vocabulary follows.
    """
    whole = size // extent
    if whole > first:
        starts = extent * jnp.arange(first, whole, dtype=jnp.int32)
        found, _ = lax.scan(lambda f, start: (function(f, start, extent), None), found, starts)
    rest = size - whole * extent
    return function(found, whole * extent, rest) if rest else found


def rows(x) -> jax.Array:
    """Features, possibly zero of them, with the tokens in one dimension."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def by_tokens(function: Callable, chunks: int, *arrays):
    """Run a function on chunks of tokens, one after another; merge the results, unpadded."""
    if chunks == 1:
        return function(*arrays)
    tokens, split = len(arrays[0]), _every(chunks, *arrays)

    def chunk(_, number):
        # Taken one at a time, so that none of the arrays is copied whole.
        of_chunk = (lax.dynamic_index_in_dim(a, number, 1, keepdims=False) for a in leaves)
        return None, function(*jax.tree.unflatten(tree, of_chunk))

    leaves, tree = jax.tree.flatten(split)
    _, found = lax.scan(chunk, None, jnp.arange(chunks, dtype=jnp.int32))
    return together(found, tokens)


def together(found, tokens: int):
    """Merge arrays of chunks, as `in_chunks` returns them, into arrays of `tokens` tokens."""

    def merged(f):
        return jnp.swapaxes(f, 0, 1).reshape(f.shape[0] * f.shape[1], *f.shape[2:])[:tokens]

    return jax.tree.map(merged, found)


def in_chunks(chunks: int, *arrays):
    """Split arrays, or trees of them, into chunks along a new first dimension, padded with zeros.

    Chunk i has the tokens i, i + chunks, i + 2 chunks, ...: if tokens are sharded, each device has
    tokens of its own in every chunk.
    """
    return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), _every(chunks, *arrays))


def _every(chunks: int, *arrays):
    """Split arrays as `in_chunks` does, with chunks as the second dimension."""
    size = -(-len(arrays[0]) // chunks)

    def split(a):
        padding = chunks * size - len(a)
        a = jnp.pad(a, ((0, padding), *[(0, 0)] * (a.ndim - 1))) if padding else a
        return a.reshape(size, chunks, *a.shape[1:])

    return jax.tree.map(split, arrays)


# --- the vocabulary -------------------------------------------------------------------------------


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


# --- the softmax ----------------------------------------------------------------------------------


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
