"""Public `batch_invariant`: batch-invariant products for a part of a program."""

import contextlib
from collections.abc import Iterator

from jax_tcgemm.products.arguments import rows_that_decide
from jax_tcgemm.system.invariance import invariance


@contextlib.contextmanager
def batch_invariant(rows: bool | int = True) -> Iterator[None]:
    """Make products batch-invariant in a `with` block or a decorated function.

    The bits of each row of a product then depend on that row and the weights alone, not on the
    number of rows, their order, the group sizes, or the sharding of rows over devices.

    The block sets the default of the argument `batch_invariant` of `matmul`, `dot_general`,
    `linear`, `gated_linear`, `mlp`, `ragged_dot`, `ragged_dot_general`, `gated_ragged_linear`,
    `linear_log_prob`, `linear_cross_entropy` and `linear_top_k`, and thereby of the products that
    `patch` replaces. Calls that name an implementation use that implementation. Functions without
    such an argument are not affected: contractions, BLAS, collectives and the products that
    `accelerate` rewrites.

    The setting applies where a function is traced. JAX's caches distinguish functions traced inside
    the block from functions traced outside. Other threads are not affected.

    Args:
      rows: the number of rows for which a config is selected; the config then runs any number of
        rows. True means 4096, and False cancels an outer block. Programs with equal `rows` give
        equal bits.

    Returns:
      A context manager that is also a decorator.

    Raises:
      TypeError: if `rows` is neither a bool nor an integer.
      ValueError: if `rows` is below 2, or if only XLA can run a product in the block.

    Numerics:
      Each product is computed with one config and one order of summation.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jax.random.normal(jax.random.key(0), (64, 32)), jnp.ones((32, 16))
      >>> with jax_tcgemm.batch_invariant():
      ...     bool((jax_tcgemm.matmul(x, w)[:1] == jax_tcgemm.matmul(x[:1], w)).all())
      True
    """
    with invariance(rows_that_decide("batch_invariant", "rows", rows)):
        yield
