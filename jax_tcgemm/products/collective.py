"""The public `all_gather_matmul` and `matmul_reduce_scatter`, for use inside `jax.shard_map`."""

import jax
from jax import lax

from jax_tcgemm.primitives.collective import How, gather_product, scatter_product
from jax_tcgemm.primitives.rules import same_varying
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    as_array,
    call_options,
    canonical_element_type,
    check_manual,
    promoted_dtype,
)


def all_gather_matmul(
    x,
    w,
    axis_name,
    *,
    chunks: int | None = None,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gathers the rows of x from every device of a mesh axis and multiplies them by w.

        out = all_gather(x, rows) @ w

    for use inside `jax.shard_map`, where every device has other rows of x and, as a rule, other
    columns of w: the first half of a tensor-parallel MLP. While the other devices' rows are on
    their way, this one multiplies its own, so that only what takes longer than that is waited for.
    On an axis of one device it is the plain product. It can be differentiated any number of times,
    forwards and backwards, and batched by `jax.vmap`; the gradient of x is a
    `matmul_reduce_scatter`, and the gathered x is kept for that of w (unless `jax.checkpoint` says
    otherwise).

    Args:
      x: this device's rows, an array of shape (..., m, k).
      w: this device's matrix, of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: pieces in which a shard is moved; it must divide m. More than one helps where moving a
        shard takes longer than multiplying one, and costs the efficiency of smaller products. None
        is 1, and 2 for the gradient, where m is even.
      precision: as of `jax_tcgemm.matmul`.
      preferred_element_type: dtype of the result; None takes what the dtypes of x and w promote to.
      implementation: as of `jax_tcgemm.matmul`; gradients inherit it.

    Returns:
      Array of shape (..., s * m, n), the rows in the order of the devices.

    Raises:
      TypeError: for operands that are not numeric arrays.
      ValueError: for shapes that do not fit, chunks that do not divide m, an axis that is not a
        manual one here, or an unknown implementation.

    Numerics:
      As `jax_tcgemm.matmul`; the result is the same, bit for bit, on every device that has the
      same w.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
      >>> f = jax.shard_map(
      ...     lambda x, w: jax_tcgemm.all_gather_matmul(x, w, "model"),
      ...     mesh=mesh, in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model"),
      ... )
      >>> f(jnp.ones((8, 4)), jnp.ones((4, 6))).shape
      (8, 6)
    """
    how, x, w = _checked(
        "all_gather_matmul",
        *(x, w, axis_name, chunks, precision, preferred_element_type, implementation),
    )
    if x.shape[-2] % (chunks or 1):
        raise ValueError(
            f"all_gather_matmul: chunks must divide the rows of x, got {chunks=} and {x.shape=}; "
            "1 always does"
        )
    return gather_product(how, x, w)


def matmul_reduce_scatter(
    x,
    w,
    axis_name,
    *,
    chunks: int | None = None,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies by w, sums over every device of a mesh axis and leaves each its rows of the sum.

        out = psum_scatter(x @ w, rows)

    for use inside `jax.shard_map`, where every device has other columns of x and rows of w: the
    second half of a tensor-parallel MLP. The rows are multiplied in pieces, each with rows for
    every device, and a piece is sent while the next one is multiplied. On an axis of one device it
    is the plain product. It can be differentiated any number of times, forwards and backwards, and
    batched by `jax.vmap`; the gradient of x is an `all_gather_matmul`, whose gathered rows serve
    that of w, too.

    Args:
      x: array of shape (..., s * m, k).
      w: array of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: pieces in which the rows for one device are multiplied and moved; it must divide m.
        The last one's transfer is not hidden. None is 2 where m is even, and 1 for the gradient.
      precision: as of `jax_tcgemm.matmul`.
      preferred_element_type: dtype of the result, and of what is sent; None takes what the dtypes
        of x and w promote to.
      implementation: as of `jax_tcgemm.matmul`; gradients inherit it.

    Returns:
      Array of shape (..., m, n): the rows, of the sum, that belong to this device.

    Raises:
      TypeError: for operands that are not numeric arrays.
      ValueError: for shapes that do not fit, rows that s * chunks does not divide, an axis that is
        not a manual one here, or an unknown implementation.

    Numerics:
      As `jax_tcgemm.matmul` for each device's product, which is rounded to the result's dtype;
      their sum, in float32 for 16-bit types, is rounded once more. The same program gives the same
      bits each time.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
      >>> f = jax.shard_map(
      ...     lambda x, w: jax_tcgemm.matmul_reduce_scatter(x, w, "model"),
      ...     mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P("model"),
      ... )
      >>> f(jnp.ones((8, 4)), jnp.ones((4, 6))).shape
      (8, 6)
    """
    how, x, w = _checked(
        "matmul_reduce_scatter",
        *(x, w, axis_name, chunks, precision, preferred_element_type, implementation),
    )
    size = lax.axis_size(axis_name)
    if x.shape[-2] % (size * (chunks or 1)):
        raise ValueError(
            f"matmul_reduce_scatter: the rows of x must be a multiple of devices times chunks, got "
            f"{x.shape=}, {size} devices and {chunks=}; pad them"
        )
    return scatter_product(how, x, w)


def _checked(op, x, w, axis_name, chunks, precision, preferred_element_type, implementation):
    x, w = as_array(op, "x", x), as_array(op, "w", w)
    options = call_options(op, implementation)
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: x and w must have shapes (..., m, k) and (k, n), got {x.shape=} and "
            f"{w.shape=}; reshape them"
        )
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(
            f"{op}: chunks must be a positive integer or None, got {chunks=}; None is the default"
        )
    check_manual(op, "axis_name", axis_name)
    promoted = promoted_dtype(op, x.dtype, w.dtype)
    dtype = canonical_element_type(op, preferred_element_type) or promoted
    x, w = (operand.astype(promoted) for operand in (x, w))
    how = How(options, axis_name, chunks, 0, dtype, canonical_precision(op, precision))
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return how, *same_varying(x, w, over=axes)
