"""Products that overlap with the exchange of their operand or result, inside `jax.shard_map`.

Nothing is waited for before something is computed. To gather, a device multiplies its own shard
while the others' are on their way; to scatter, it multiplies the others' rows first and its own
last, while the products travel. Shards go straight from their owner to each other device, not
around a ring: on NVSwitch every pair has the full bandwidth, no transfer waits for another, and a
sum of products is rounded once, not once a hop.

XLA may start each transfer as soon as its operand exists and has to wait for it only where its
result is used. All is made of `lax.ppermute` and our products, so that it runs wherever they do.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.dot_general import as_array, canonical_element_type
from jax_tcgemm.precision import canonical_precision
from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.selection import check_names


@dataclasses.dataclass(frozen=True)
class _How:
    """What a call says beside its arrays.

    Attributes:
      axis_name: the mesh axis, or several.
      chunks: pieces in which a shard is moved and multiplied.
      w_axis: the contracted axis of w: 0, or 1 where w is transposed.
      dtype: of the result.
      precision: canonical.
      implementation: name to force, or None.
    """

    axis_name: str | tuple[str, ...]
    chunks: int
    w_axis: int
    dtype: jnp.dtype
    precision: object
    implementation: str | None

    def product(self, lhs, rhs, contract, dtype=None):
        """The product over `contract`, a pair of tuples of axes."""
        return primitive.dot_general(
            lhs,
            rhs,
            dimension_numbers=(contract, ((), ())),
            precision=self.precision,
            preferred_element_type=dtype or self.dtype,
            implementation=self.implementation,
        )

    def times_w(self, x, w):
        """The product of x (..., k) and w."""
        return self.product(x, w, ((x.ndim - 1,), (self.w_axis,)))

    def w_bar(self, x, ct, w):
        """The cotangent of w, from that of `times_w(x, w)`."""
        operands = (x, ct) if self.w_axis == 0 else (ct, x)
        rows = tuple(range(x.ndim - 1))
        return self.product(*operands, (rows, rows), w.dtype)

    def transposed(self, dtype):
        """How the cotangent of x comes about."""
        return dataclasses.replace(self, w_axis=1 - self.w_axis, dtype=dtype)

    def moved(self, x, shift: int):
        """Device i's `x` on device i + shift."""
        size = lax.axis_size(self.axis_name)
        pairs = [(source, (source + shift) % size) for source in range(size)]
        return lax.ppermute(x, self.axis_name, pairs)


def all_gather_matmul(
    x,
    w,
    axis_name,
    *,
    chunks: int = 1,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
) -> jax.Array:
    """Gathers the rows of x from every device of a mesh axis and multiplies them by w.

        out = all_gather(x, rows) @ w

    for use inside `jax.shard_map`, where every device has other rows of x and, as a rule, other
    columns of w: the first half of a tensor-parallel MLP. Each shard is multiplied when it arrives,
    so that only what takes longer than the products is waited for. On an axis of one device it is
    the plain product. Reverse-mode differentiation of any order and `jax.vmap` are supported; the
    gradient of x is a `matmul_reduce_scatter`, and the gathered x is kept for that of w (unless
    `jax.checkpoint` says otherwise).

    Args:
      x: this device's rows, an array of shape (..., m, k).
      w: this device's matrix, of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: pieces in which a shard is moved and multiplied; it must divide m. More than one helps
        where moving a shard takes longer than multiplying one, and costs the efficiency of smaller
        products.
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
    if x.shape[-2] % chunks:
        raise ValueError(
            f"all_gather_matmul: chunks must divide the rows of x, got {chunks=} and {x.shape=}; "
            "1 always does"
        )
    return _gather_product(how, x, w)


def matmul_reduce_scatter(
    x,
    w,
    axis_name,
    *,
    chunks: int = 1,
    precision=None,
    preferred_element_type=None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies by w, sums over every device of a mesh axis and leaves each its rows of the sum.

        out = psum_scatter(x @ w, rows)

    for use inside `jax.shard_map`, where every device has other columns of x and rows of w: the
    second half of a tensor-parallel MLP. Each device's rows are sent when they are multiplied, its
    own come last. On an axis of one device it is the plain product. Reverse-mode differentiation of
    any order and `jax.vmap` are supported; the gradient of x is an `all_gather_matmul`.

    Args:
      x: array of shape (..., s * m, k).
      w: array of shape (k, n).
      axis_name: the mesh axis, or a tuple of axes, of `s` devices.
      chunks: pieces in which the rows for one device are multiplied and moved; it must divide m.
        See `all_gather_matmul`.
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
    if x.shape[-2] % (size * chunks):
        raise ValueError(
            f"matmul_reduce_scatter: the rows of x must be a multiple of devices times chunks, got "
            f"{x.shape=}, {size} devices and {chunks=}; pad them"
        )
    return _scatter_product(how, x, w)


def _checked(op, x, w, axis_name, chunks, precision, preferred_element_type, implementation):
    x, w = as_array(op, "x", x), as_array(op, "w", w)
    check_names(op, implementation, None)
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: x and w must have shapes (..., m, k) and (k, n), got {x.shape=} and "
            f"{w.shape=}; reshape them"
        )
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(
            f"{op}: chunks must be a positive integer, got {chunks=}; 1 is the default"
        )
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name must be a mesh axis that is manual here, got {axis_name=}; call it "
            "inside jax.shard_map"
        ) from None
    dtype = canonical_element_type(op, preferred_element_type) or jnp.promote_types(
        x.dtype, w.dtype
    )
    x, w = (operand.astype(jnp.promote_types(x.dtype, w.dtype)) for operand in (x, w))
    how = _How(axis_name, chunks, 0, dtype, canonical_precision(precision), implementation)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return how, *primitive.same_varying(x, w, over=axes)


# --- gather, then multiply ----------------------------------------------------------------------


def _gather(how: _How, x, w):
    """all_gather(x) @ w, and all_gather(x)."""
    size = lax.axis_size(how.axis_name)
    # By distance: the shard of device i + shift. All set out before anything is multiplied.
    shards = [[x]]
    for shift in range(1, size):
        shards.append([how.moved(chunk, -shift) for chunk in _split(x, how.chunks)])
    products = [[how.times_w(chunk, w) for chunk in shard] for shard in shards]
    return _by_device(how, products), _by_device(how, shards)


def _by_device(how: _How, shards):
    """Shards, listed by distance from this device, as one array in the order of the devices."""
    if len(shards) == 1:
        return shards[0][0]
    rows = shards[0][0].shape[-2]
    # Twice around, so that any device's turn is a slice: one pass over memory when XLA fuses it.
    around = [chunk for shard in shards + shards[:-1] for chunk in shard]
    first = (len(shards) - lax.axis_index(how.axis_name)) % len(shards)
    around = lax.concatenate(around, around[0].ndim - 2)
    return lax.dynamic_slice_in_dim(around, first * rows, len(shards) * rows, around.ndim - 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_product(how: _How, x, w):
    return _gather(how, x, w)[0]


def _gather_product_fwd(how, x, w):
    out, gathered = _gather(how, x, w)
    return out, (gathered, w)


def _gather_product_bwd(how, saved, ct):
    gathered, w = saved
    x_bar = _scatter_product(how.transposed(gathered.dtype), ct, w)
    return x_bar, how.w_bar(gathered, ct, w)


_gather_product.defvjp(_gather_product_fwd, _gather_product_bwd)


# --- multiply, then scatter ---------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_product(how: _How, x, w):
    size, index = lax.axis_size(how.axis_name), lax.axis_index(how.axis_name)
    if size == 1:
        return how.times_w(x, w)
    rows = x.shape[-2] // size
    addends = []
    for shift in range(1, size):
        shard = lax.dynamic_slice_in_dim(x, (index + shift) % size * rows, rows, x.ndim - 2)
        products = [how.times_w(chunk, w) for chunk in _split(shard, how.chunks)]
        addends.append([how.moved(product, shift) for product in products])
    own = how.times_w(lax.dynamic_slice_in_dim(x, index * rows, rows, x.ndim - 2), w)
    is_narrow = jnp.issubdtype(own.dtype, jnp.floating) and own.dtype.itemsize < 4
    wide = jnp.float32 if is_narrow else own.dtype
    total = own.astype(wide)
    for chunks in addends:
        total += lax.concatenate(chunks, own.ndim - 2).astype(wide)
    return total.astype(how.dtype)


def _scatter_product_fwd(how, x, w):
    return _scatter_product(how, x, w), (x, w)


def _scatter_product_bwd(how, saved, ct):
    x, w = saved
    x_bar, gathered = _gather(how.transposed(x.dtype), ct, w)
    return x_bar, how.w_bar(x, gathered, w)


_scatter_product.defvjp(_scatter_product_fwd, _scatter_product_bwd)


def _split(x, chunks: int):
    """The rows of x in equal pieces."""
    return [x] if chunks == 1 else jnp.split(x, chunks, x.ndim - 2)
