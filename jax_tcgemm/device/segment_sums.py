"""Sums of rows that have the same index, by XLA, in an order that only the indices decide.

XLA's own scatter adds rows in no fixed order on a GPU. Here rows are read in the order of their
indices, and sums are those of a tree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Rows that one step of a sum adds: as many as a token has experts, mostly, so that one is enough.
_WINDOW = 8


def segment_sums(rows: jax.Array, indices: jax.Array, num_sums: int) -> jax.Array:
    """out[r] = sum of rows[i] over the i with indices[i] = r, in the dtype of the rows.

    Args:
      rows: array of shape (m, n).
      indices: int32 array of shape (m,); what is not in [0, num_sums) belongs to no sum.
      num_sums: rows of the result.
    """
    num_rows = rows.shape[0]
    if num_rows == 0 or num_sums == 0:
        return jnp.zeros((num_sums, rows.shape[1]), rows.dtype)
    indices = jnp.where(indices < 0, num_sums, indices)
    _, order = lax.sort_key_val(indices, lax.iota(np.int32, num_rows))
    counts = jnp.zeros(num_sums, np.int32).at[indices].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=np.int32)

    def read(items):
        return _rows(rows, _rows(order, items))

    return _of_consecutive(read, ends - counts, ends, num_rows)


def _rows(x, indices):
    """x[indices], all of which are in range."""
    return x.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _of_consecutive(read, starts, ends, num_items: int):
    """Sums of consecutive items: of those from starts[r] to ends[r], for every r.

    A window of items for every r comes first, which is all as a rule. The others are summed a
    window at a time, and these sums, of which there are so many times fewer, in the same way.
    """

    def windows(starts, ends):
        items = starts[:, None] + lax.iota(np.int32, min(_WINDOW, num_items))
        found = read(jnp.minimum(items, num_items - 1))
        found = jnp.where((items < ends[:, None])[..., None], found, 0)
        return jnp.sum(found, 1, dtype=found.dtype)

    out = windows(starts, ends)
    if num_items <= _WINDOW:
        return out
    num_sums, num_more = starts.shape[0], num_items // _WINDOW
    more = jnp.maximum((ends - starts - 1) // _WINDOW, 0)
    more_ends = jnp.cumsum(more, dtype=np.int32)
    more_starts = more_ends - more
    window = lax.iota(np.int32, num_more)
    owner = jnp.repeat(lax.iota(np.int32, num_sums), more, total_repeat_length=num_more)
    begin = _rows(starts, owner) + _WINDOW * (1 + window - _rows(more_starts, owner))
    stop = jnp.where(window < more_ends[-1], _rows(ends, owner), begin)
    partial = windows(begin, stop)

    num_owners = min(num_sums, num_more)
    (owners,) = jnp.nonzero(more, size=num_owners, fill_value=num_sums)
    sums = _of_consecutive(
        functools.partial(_rows, partial),
        more_starts.at[owners].get(mode="fill", fill_value=0),
        more_ends.at[owners].get(mode="fill", fill_value=0),
        num_more,
    )
    # No row twice, also of those that are out of range.
    owners = jnp.where(owners < num_sums, owners, num_sums + lax.iota(owners.dtype, num_owners))
    return out.at[owners].add(sums, mode="drop", unique_indices=True)
