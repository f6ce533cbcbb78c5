"""Chunks of tokens and of the vocabulary: their number, and loops over chunks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.losses.how import How


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
