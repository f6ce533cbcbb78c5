"""The public `combine_rows`: what puts the outputs of a token's experts together."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.primitives import rows as primitive
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.products.arguments import as_array, as_integers, call_options, check_flag


def combine_rows(
    rows,
    indices,
    weights=None,
    *,
    unique_indices: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Weighted sums of rows, which are taken through indices.

        out[t] = sum over j of weights[t, j] * rows[indices[t, j]]

    This is the last step of a mixture of experts: `rows` are the outputs of the experts, sorted by
    expert, and `indices[t]` says where those of token t are. It is the scatter-add of weighted
    outputs to their tokens, read from the side of the tokens, so that nothing is added in an order
    that depends on the run; its gradient for `rows` scatters in the same way.

    Args:
      rows: floating-point array of shape (r, n).
      indices: integers of shape (t, j). One that is no row of `rows` adds nothing.
      weights: None, for plain sums, or an array of shape (t, j).
      unique_indices: a promise that no row is taken twice, as of a mixture of experts; its gradient
        for `rows` then needs no sort. Without it being true that gradient is undefined.
      implementation: "simt" (on a GPU), "host" or "xla", which then runs it or the call fails; None
        selects one, and `jax_tcgemm.explain` says which. Derivatives inherit it.

    Returns:
      Array of shape (t, n), of the dtype of `rows`.

    Raises:
      TypeError: for rows or weights that are not floating point, and indices that are not integers.
      ValueError: for shapes that do not fit, an unknown implementation, or, when the program is
        lowered, an implementation that was asked for by name and cannot run it.

    Numerics:
      Sums are kept in float32 (float64 for float64) in the order of j, weights are float32, and the
      result is rounded once. The gradient for `weights` is a product of rows, summed in float32;
      that for `rows` adds, where a row is taken more than once, in the order of (t, j), or "xla" in
      that of a tree. The same program gives the same bits each time.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> rows = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
      >>> indices, weights = jnp.array([[0, 2], [1, 0]]), jnp.array([[1.0, 0.5], [2.0, 1.0]])
      >>> jax_tcgemm.combine_rows(rows, indices, weights)
      Array([[ 51., 102.],
             [ 21.,  42.]], dtype=float32)
    """
    op = "combine_rows"
    options = call_options(op, implementation, kind="rows")
    rows, indices = as_array(op, "rows", rows), as_integers(op, "indices", indices)
    _check_floating(op, "rows", rows)
    for name, x, rule in (("rows", rows, "(r, n)"), ("indices", indices, "(t, j)")):
        if x.ndim != 2:
            raise ValueError(
                f"{op}: {name} must have shape {rule}, got {name}.shape={x.shape}; reshape it"
            )
    if weights is not None:
        weights = as_array(op, "weights", weights)
        _check_floating(op, "weights", weights)
        if weights.shape != indices.shape:
            raise ValueError(
                f"{op}: weights must have the shape of indices, {indices.shape}, got "
                f"weights.shape={weights.shape}; pass one weight for each index"
            )
        weights = jnp.ravel(weights).astype(wide_dtype(rows.dtype))
    is_unique = check_flag(op, "unique_indices", unique_indices)
    num_targets, degree = indices.shape
    if indices.size == 0:
        return jnp.zeros((num_targets, rows.shape[1]), rows.dtype)
    targets = lax.broadcasted_iota(indices.dtype, indices.shape, 0)
    return primitive.sums(
        rows,
        jnp.ravel(indices),
        jnp.ravel(targets),
        weights,
        options=options,
        num_targets=num_targets,
        patterns=("unique" if is_unique else None, degree),
    )


def _check_floating(op: str, name: str, x) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{op}: {name} must be floating point, got {name}.dtype={x.dtype}; convert it first"
        )
