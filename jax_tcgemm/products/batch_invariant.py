"""The public `batch_invariant`: rows that do not depend on one another, for a part of a program."""

import contextlib
from collections.abc import Iterator

from jax_tcgemm.products.arguments import rows_that_decide
from jax_tcgemm.system.invariance import invariance


@contextlib.contextmanager
def batch_invariant(rows: bool | int = True) -> Iterator[None]:
    """Has the bits of each row of a product depend on that row and the weights alone, in a block.

    Not on how many rows there are, on their order, on the sizes of groups, or on how rows are
    divided over devices. It is the default of the argument `batch_invariant` of `matmul`,
    `dot_general`, `linear`, `gated_linear`, `mlp`, `ragged_dot`, `ragged_dot_general`,
    `gated_ragged_linear`, `linear_log_prob`, `linear_cross_entropy` and `linear_top_k`, and so of
    what `patch` turns into these. Calls that name an implementation have that one, and what has no
    such argument is as it was: contractions, BLAS, collectives and what `accelerate` finds.

    What counts is where a function is traced. JAX's caches tell apart what was traced inside and
    outside. It also decorates a function. Other threads are not affected.

    Args:
      rows: for how many rows the config is chosen that then runs any number of them; True takes
        4096, and False undoes an outer block. Rows have the same bits as others of the same number.

    Returns:
      A context manager, which is also a decorator.

    Raises:
      TypeError: when `rows` is neither a flag nor a number.
      ValueError: when it is a number below 2, and from a product in the block that only XLA runs.

    Numerics:
      Those of the products, each by one config with one order of sums.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jax.random.normal(jax.random.key(0), (64, 32)), jnp.ones((32, 16))
      >>> with jax_tcgemm.batch_invariant():
      ...     bool((jax_tcgemm.matmul(x, w)[:1] == jax_tcgemm.matmul(x[:1], w)).all())
      True
    """
    with invariance(rows_that_decide("batch_invariant", "rows", rows)):
        yield
