"""The rows of a grouped product and the groups that they belong to, for functions of accumulators.

An epilogue takes, for each row, the operand of the row's group. Its results are zeros in rows that
belong to no group.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device.rows import take
from jax_tcgemm.primitives import ragged_dot as plain
from jax_tcgemm.primitives.encodings import Rows
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding import partitioning, ragged_division


@dataclasses.dataclass(frozen=True)
class RowsOfGroups(Rows):
    """The rows of a product's accumulators.

    Attributes:
      numbers: for each row its group's number among the weights, -1 where it belongs to no group;
        (*b, rows).
      shape: of an accumulator, (*b, rows, columns).
      by_group: for each operand of the epilogue, whether it is held by group; operands beyond
        these are not.
      options: options of the call.
    """

    numbers: jax.Array
    shape: tuple[int, ...]
    by_group: tuple[bool, ...]
    options: CallOptions

    @classmethod
    def of(cls, group_sizes, group_offset, groups: int, shape, by_group, options):
        """Find the group of each row from the operands of a product with `groups` weights."""
        numbers = _numbers(group_sizes, group_offset, groups, shape[-2])
        return cls(numbers, tuple(shape), by_group, options)

    def given(self, operands: Sequence) -> list:
        """Return what the epilogue takes for its operands, some of which may be None."""
        return [
            self._of_groups(x) if own and x is not None else x
            for x, own in zip(operands, padded(self.by_group, len(operands)), strict=True)
        ]

    def masked(self, results: Sequence) -> list[jax.Array]:
        """Return results with zeros in the rows that belong to no group."""
        is_there = jnp.broadcast_to((self.numbers >= 0)[..., None], self.shape)

        def masked(y):
            own = partitioning.resharded(is_there, jax.typeof(y).sharding)
            return jnp.where(own, y, jnp.zeros((), y.dtype))

        return [masked(y) for y in results]

    def _of_groups(self, x) -> jax.Array:
        """x[..., numbers[i], 0, :] for each row i, of all batch dimensions; 0 where none is."""
        x = lax.squeeze(x, (x.ndim - 2,))
        if jnp.issubdtype(x.dtype, np.floating):
            # XLA does it inside of the epilogue's loop, and adds up few groups of many rows well.
            found = plain.take_rows(self.options.selecting(selection.XLA), x, self.numbers)
        else:
            found = plain.over_batch(take, x, self.numbers)
        return jnp.broadcast_to(found, (*self.shape[:-1], x.shape[-1]))


def padded(by_group: Sequence[bool], number: int) -> tuple[bool, ...]:
    """Return `by_group` for this number of operands; further operands are not by group."""
    return (*by_group, *[False] * number)[:number]


def _numbers(group_sizes, group_offset, groups: int, num_rows: int) -> jax.Array:
    num_sizes = group_sizes.shape[-1]
    ends = ragged_division.ends_of_groups(group_sizes, num_rows)
    first = jnp.clip(group_offset, 0, num_sizes)

    def before(ends):
        """How many groups end at each row or before it."""
        counts = jnp.zeros(num_rows + 1, np.int32).at[ends].add(1)
        return jnp.cumsum(counts[:num_rows], dtype=np.int32)

    for _ in group_sizes.shape[:-1]:
        before = jax.vmap(before)
    found = before(ends)
    own = found - first
    is_there = (found < num_sizes) & (own >= 0) & (own < groups)
    return jnp.where(is_there, own, -1)
