"""Public `combine_rows`: weighted sum of the expert outputs of each token."""

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
    """Weighted sums of rows, selected by indices.

        out[t] = sum over j of weights[t, j] * rows[indices[t, j]]

    This is the last step of a mixture of experts: `rows` are the outputs of the experts, sorted by
    expert, and `indices[t]` are the rows of token t. The function replaces the scatter-add of
    weighted outputs to tokens. The function gathers instead of scattering, so the order of
    additions never varies between runs. The gradient of `rows` scatters in the same deterministic
    way.

    Args:
      rows: floating-point array of shape (r, n).
      indices: integers of shape (t, j). An index outside `rows` adds nothing.
      weights: None for plain sums, or an array of shape (t, j).
      unique_indices: a promise that no index occurs twice, as in a mixture of experts. The gradient
        of `rows` then needs no sort. If the promise is wrong, the gradient is undefined.
      implementation: "simt" (on a GPU), "host" or "xla", which must run the call; the call fails if
        the implementation cannot. None selects an implementation, which `jax_tcgemm.explain`
        reports. Derivatives inherit the implementation.

    Returns:
      Array of shape (t, n), of the dtype of `rows`.

    Raises:
      TypeError: if rows or weights are not floating point, or indices are not integers.
      ValueError: if shapes do not match or an implementation is unknown. Also, at lowering, if the
        named implementation cannot run the call.

    Numerics:
      - Sums accumulate in float32 (float64 for float64) in the order of j, with float32 weights,
        and the result is rounded once.
      - The gradient of `weights` is a product of rows, summed in float32.
      - The gradient of `rows` adds repeated indices in the order of (t, j); "xla" adds them in a
        tree.
      - The same program gives the same bits.

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
