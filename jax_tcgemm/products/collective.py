"""Public products that exchange arrays and `all_reduce`, for use inside `jax.shard_map`."""

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
from jax_tcgemm.sharding import all_reduce as primitive


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
    """Gather the rows of x from every device of a mesh axis and multiply the rows by w.

        out = all_gather(x, rows) @ w

    The function runs inside `jax.shard_map`, where each device has different rows of x and usually
    different columns of w, as in the first half of a tensor-parallel MLP. While the rows of other
    devices arrive, the device multiplies its own rows; only transfer time beyond that product is
    exposed. On an axis of one device, the function is a plain product.

    The function can be differentiated any number of times, in forward and reverse mode, and batched
    by `jax.vmap`. The gradient of x is a `matmul_reduce_scatter`. The gathered x is stored for the
    gradient of w (unless `jax.checkpoint` says otherwise).

    Args:
      x: the device's rows, an array of shape (..., m, k).
      w: the device's matrix, of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: number of chunks in which a shard is sent; must divide m. More than one chunk helps if
        sending a shard takes longer than multiplying a shard, but smaller products are less
        efficient. None means 1, or 2 for the gradient if m is even.
      precision: precision of the product; see `matmul`.
      preferred_element_type: dtype of the result. None selects the dtype that x and w promote to.
      implementation: name of an implementation; see `matmul`. Gradients inherit the implementation.

    Returns:
      Array of shape (..., s * m, n), with rows in the order of the devices.

    Raises:
      TypeError: if operands are not numeric arrays.
      ValueError: if shapes do not match, chunks does not divide m, the axis is not a manual axis
        here, or an implementation is unknown.

    Numerics:
      The rules of `matmul` apply. Devices with equal w get bit-equal results.

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
    """Multiply x by w, sum over the devices of a mesh axis, and scatter the rows of the sum.

        out = psum_scatter(x @ w, rows)

    The function runs inside `jax.shard_map`, where each device has different columns of x and rows
    of w, as in the second half of a tensor-parallel MLP. The rows are multiplied in chunks; each
    chunk has rows for every device. One chunk is sent while the next chunk is multiplied. On an
    axis of one device, the function is a plain product.

    The function can be differentiated any number of times, in forward and reverse mode, and batched
    by `jax.vmap`. The gradient of x is an `all_gather_matmul`, whose gathered rows are also used
    for the gradient of w.

    Args:
      x: array of shape (..., s * m, k).
      w: array of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: number of chunks in which the rows for one device are multiplied and sent; must divide
        m. The transfer of the last chunk is exposed. None means 2 if m is even (else 1), and 1 for
        the gradient.
      precision: precision of the product; see `matmul`.
      preferred_element_type: dtype of the result and of the data sent. None selects the dtype that
        x and w promote to.
      implementation: name of an implementation; see `matmul`. Gradients inherit the implementation.

    Returns:
      Array of shape (..., m, n), the rows of the sum that belong to this device.

    Raises:
      TypeError: if operands are not numeric arrays.
      ValueError: if shapes do not match, s * chunks does not divide the rows, the axis is not a
        manual axis here, or an implementation is unknown.

    Numerics:
      Each device's product follows `matmul` and is rounded to the result's dtype. The sum over
      devices is computed in float32 for 16-bit dtypes and rounded once more. The same program gives
      the same bits.

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


def all_reduce(x, axis_name, *, implementation: str | None = None) -> jax.Array:
    """Sum an array over the devices of a mesh axis, as `jax.lax.psum` does.

        out = x of device 0 + x of device 1 + ...

    The function runs inside `jax.shard_map`, for example after a product whose contracted dimension
    is sharded: `all_reduce(linear(x, w), "model")`. For small arrays, such as those of a decode
    step, the devices exchange their arrays by one kernel that stores to the memory of the other
    devices. Otherwise, a default call is `jax.lax.psum`; `explain` prints the selection.

    Products of this library over explicit or automatic mesh axes sum over devices in the same way,
    without a call of this function.

    The kernel, "peer_memory", requires that

    - the devices are GPUs of one process, at most 8, that can access each other's memory;
    - the axis, or the tuple of axes, covers all devices of the mesh;
    - the array has at most 8 MiB divided by the number of other devices, of dtype float16, bfloat16
      or float32.

    Each device allocates 18 to 32 MiB for the exchange, outside of JAX's memory pool, when the
    first program with such a sum starts. As for all programs that communicate, call
    programs that share devices from one thread: if devices run programs in different orders, or a
    device waits over 120 seconds for another device, results are NaN and the next call raises an
    error.

    Args:
      x: the device's array.
      axis_name: the mesh axis, or a tuple of axes.
      implementation: "peer_memory", "xla" or None, which selects the kernel where it can run.

    Returns:
      Array with the shape and dtype of x, equal on all devices of the axis.

    Raises:
      TypeError: if x is not a numeric array.
      ValueError: if the axis is not a manual axis here, or an implementation is unknown or cannot
        run the call.

    Numerics:
      The kernel sums in float32, in the order of the devices, and rounds once. All devices get the
      same bits. XLA's all-reduce of 16-bit arrays may round after each addition.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
      >>> f = jax.shard_map(
      ...     lambda x: jax_tcgemm.all_reduce(x, "model"),
      ...     mesh=mesh, in_specs=P(None, "model"), out_specs=P(),
      ... )
      >>> f(jnp.ones((2, 4))).shape
      (2, 4)
    """
    op = "all_reduce"
    x = as_array(op, "x", x)
    options = call_options(op, implementation, kind="all_reduce")
    check_manual(op, "axis_name", axis_name)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    (x,) = same_varying(x, over=axes)
    return primitive.all_reduce(x, axes, jax.sharding.get_abstract_mesh().shape, options)


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
