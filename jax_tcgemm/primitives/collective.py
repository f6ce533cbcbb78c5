"""Products that overlap with the exchange of their operand or result over a manual mesh axis.

    gather     out = all_gather(x, rows) @ w
    scatter    out = psum_scatter(x @ w, rows)

x (*b, ..., m, k), w (*b, k, n) or, by `How.w_axis`, (*b, n, k). Each is the other's transpose.

Nothing is waited for before something is computed. To gather, a device multiplies its own shard
while the others' are on their way, and then those together; to scatter, it multiplies the rows in
chunks, each with rows of every device, and a chunk travels while the next one is multiplied. Each
product is as large as that allows. A chunk goes from every device to every other one at once, and
its addends are summed where they arrive: a sum of products is rounded once, not once a hop.

XLA may start each transfer as soon as its operand exists and has to wait for it only where its
result is used. All is made of `lax.all_gather`, `lax.all_to_all` and our products, so that it runs
wherever they do.

Two linear primitives stand in tangents and have the other's exchange as their transpose:

    tcgemm_gather_tangent     dx, w                  out = gather(dx, w)
    tcgemm_scatter_tangent    [dx,] [dw,] x, w       out = scatter(dx, w) + scatter(x, dw)

Parameters, all static: `how`; of the second also `moving`, which of x and w have a tangent.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.primitives.backward import define_linear
from jax_tcgemm.primitives.rules import moved
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import wide_dtype
from jax_tcgemm.system.jax_internals import ad, batching


@dataclasses.dataclass(frozen=True)
class How:
    """Parameters of a collective product.

    Attributes:
      options: options of the call.
      axis_name: the mesh axis, or several.
      chunks: chunks in which a shard is moved; None takes what is best as a rule.
      w_axis: the contracted one of w's last two dimensions: 0, or 1 where w is transposed.
      dtype: of the result.
      precision: canonical.
    """

    options: CallOptions
    axis_name: str | tuple[str, ...]
    chunks: int | None
    w_axis: int
    dtype: jnp.dtype
    precision: object

    def product(self, lhs, rhs, contract, num_batch, dtype=None):
        """The product over `contract`, a pair of tuples of axes; batch dimensions come first."""
        batch = tuple(range(num_batch))
        return primitive.dot_general(
            lhs,
            rhs,
            options=self.options,
            dimension_numbers=(contract, (batch, batch)),
            precision=self.precision,
            preferred_element_type=dtype or self.dtype,
        )

    def times_w(self, x, w):
        """The product of x and w."""
        num_batch = w.ndim - 2
        return self.product(x, w, ((x.ndim - 1,), (num_batch + self.w_axis,)), num_batch)

    def w_bar(self, x, ct, w):
        """The cotangent of w, from that of `times_w(x, w)`."""
        operands = (x, ct) if self.w_axis == 0 else (ct, x)
        rows = tuple(range(w.ndim - 2, x.ndim - 1))
        return self.product(*operands, (rows, rows), w.ndim - 2, w.dtype)

    def transposed(self, dtype):
        """How the cotangent of x comes about."""
        return dataclasses.replace(self, w_axis=1 - self.w_axis, dtype=dtype)

    @property
    def size(self) -> int:
        """Devices of the axis."""
        return lax.axis_size(self.axis_name)

    def gathered_chunks(self) -> int:
        """Number of chunks of a shard to gather; meanwhile, the own one is multiplied."""
        return self.chunks or 1

    def scattered_chunks(self, rows: int) -> int:
        """Number of chunks of `rows` rows to scatter; one moves during the next product."""
        return self.chunks or (1 if rows % 2 else 2)


def _chunk(x, devices: int, chunks: int, i: int):
    """Return the i-th of `chunks` chunks of the rows of each of `devices` shards."""
    if chunks == 1:
        return x
    axis = x.ndim - 2
    *batch, rows, columns = x.shape
    x = x.reshape(*batch, devices, chunks, rows // (devices * chunks), columns)
    x = lax.index_in_dim(x, i, axis + 1, keepdims=False)
    return lax.collapse(x, axis, axis + 2)


def _merged(chunks, devices: int):
    """Concatenate the chunks of each device's shard: the inverse of `_chunk` for all i."""
    if len(chunks) == 1:
        return chunks[0]
    axis = chunks[0].ndim - 2
    *batch, rows, columns = chunks[0].shape
    split = [x.reshape(*batch, devices, rows // devices, columns) for x in chunks]
    return lax.collapse(lax.concatenate(split, axis + 1), axis, axis + 2)


def _rotated(x, first, rows: int):
    """`rows` rows of x from `first` on, and around: one pass over memory when XLA fuses it."""
    axis = x.ndim - 2
    return lax.dynamic_slice_in_dim(lax.concatenate([x, x], axis), first, rows, axis)


# --- gather, then multiply ----------------------------------------------------------------------


def _gathered(how: How, x):
    """all_gather(x), in chunks."""
    axis, chunks = x.ndim - 2, how.gathered_chunks()
    each = (_chunk(x, 1, chunks, i) for i in range(chunks))
    return [lax.all_gather(chunk, how.axis_name, axis=axis, tiled=True) for chunk in each]


def _gather(how: How, x, w):
    """all_gather(x) @ w, and all_gather(x)."""
    size, axis = how.size, x.ndim - 2
    own = how.times_w(x, w)
    if size == 1:
        return own, x
    index, products = lax.axis_index(how.axis_name), []
    gathered = _gathered(how, x)
    for i, chunk in enumerate(gathered):
        rows = chunk.shape[axis] // size
        # The other devices' rows, those of the next device first; then all, those of the first one.
        others = _rotated(chunk, (index + 1) * rows, (size - 1) * rows)
        product = [_chunk(own, 1, len(gathered), i), how.times_w(others, w)]
        product = lax.concatenate(product, axis)
        products.append(_rotated(product, (size - index) % size * rows, size * rows))
    return _merged(products, size), _merged(gathered, size)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gather_product(how: How, x, w) -> jax.Array:
    """all_gather(x) @ w; arguments are checked, and vary over the axis."""
    return _gather(how, x, w)[0]


def _gather_jvp(how, primals, tangents):
    x, w = primals
    dx, dw = map(_instantiated, tangents)
    out, gathered = _gather(how, x, w)
    addends = []
    if dx is not None:
        addends.append(gather_tangent_p.bind(dx, w, how=how))
    if dw is not None:
        addends.append(how.times_w(gathered, dw))
    return out, functools.reduce(lax.add, addends) if addends else jnp.zeros_like(out)


gather_product.defjvp(_gather_jvp, symbolic_zeros=True)


# --- multiply, then scatter ---------------------------------------------------------------------


def _scatter(how: How, *pairs):
    """psum_scatter of the sum of x @ w over `pairs` of x and w."""
    size = how.size
    chunks = 1 if size == 1 else how.scattered_chunks(pairs[0][0].shape[-2] // size)

    def product(i):
        xs = [_chunk(x, size, chunks, i) for x, _ in pairs]
        products = [how.times_w(x, w) for x, (_, w) in zip(xs, pairs, strict=True)]
        return functools.reduce(lax.add, products)

    if size == 1:
        return product(0)
    sums = []
    for i in range(chunks):
        addends = product(i)
        axis = addends.ndim - 2
        *batch, rows, columns = addends.shape
        addends = addends.reshape(*batch, size, rows // size, columns)
        addends = lax.all_to_all(addends, how.axis_name, axis, axis)
        wide = wide_dtype(how.dtype)
        sums.append(jnp.sum(addends.astype(wide), axis, dtype=wide).astype(how.dtype))
    return lax.concatenate(sums, sums[0].ndim - 2) if len(sums) > 1 else sums[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scatter_product(how: How, x, w) -> jax.Array:
    """psum_scatter(x @ w); arguments are checked, and vary over the axis."""
    return _scatter(how, (x, w))


def _scatter_jvp(how, primals, tangents):
    tangents = list(map(_instantiated, tangents))
    out = scatter_product(how, *primals)
    moving = tuple(t is not None for t in tangents)
    if not any(moving):
        return out, jnp.zeros_like(out)
    given = [t for t in tangents if t is not None]
    return out, scatter_tangent_p.bind(*given, *primals, how=how, moving=moving)


scatter_product.defjvp(_scatter_jvp, symbolic_zeros=True)


# --- what stands in tangents --------------------------------------------------------------------


def _instantiated(tangent):
    return None if isinstance(tangent, SymbolicZero) else tangent


def _pairs(moving, *operands):
    """The factors x and w of every product in a scattered tangent."""
    *tangents, x, w = operands
    tangents = iter(tangents)
    pairs = [(next(tangents), w)] if moving[0] else []
    return [*pairs, (x, next(tangents))] if moving[1] else pairs


def _gather_plain(dx, w, *, how):
    return gather_product(how, dx, w)


def _scatter_plain(*operands, how, moving):
    products = [scatter_product(how, *pair) for pair in _pairs(moving, *operands)]
    return functools.reduce(lax.add, products)


def _scatter_at_once(*operands, how, moving):
    return _scatter(how, *_pairs(moving, *operands))


gather_tangent_p = core.Primitive("tcgemm_gather_tangent")
scatter_tangent_p = core.Primitive("tcgemm_scatter_tangent")
define_linear(gather_tangent_p, _gather_plain)
define_linear(scatter_tangent_p, _scatter_plain, run=_scatter_at_once)


def _transpose_gather(ct, dx, w, *, how):
    if type(ct) is ad.Zero:
        return [None, None]
    return [scatter_product(how.transposed(dx.aval.dtype), ct, w), None]


def _transpose_scatter(ct, *operands, how, moving):
    """The cotangents of x and w, for which the cotangent of the result is gathered once."""
    x, w = operands[-2:]
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    if moving[0]:
        x_bar, gathered = _gather(how.transposed(x.dtype), ct, w)
        bars = [x_bar]
    else:
        bars, gathered = [], _merged(_gathered(how, ct), how.size)
    if moving[1]:
        bars.append(how.w_bar(x, gathered, w))
    return [*bars, None, None]


ad.primitive_transposes[gather_tangent_p] = _transpose_gather
ad.primitive_transposes[scatter_tangent_p] = _transpose_scatter


def _batch(p, axis_data, args, dims, **params):
    """A dimension of w is one of x, too; one of x alone comes after those that both have."""
    if all(dim is None for dim in dims):
        return p.bind(*args, **params), None
    is_w = [False, True]
    if p is scatter_tangent_p:
        is_w = [w for w, moves in zip(is_w, params["moving"], strict=True) if moves] + is_w
    w_moves = any(w and dim is not None for w, dim in zip(is_w, dims, strict=True))
    new = 0 if w_moves else args[-1].ndim - 2
    args = [
        moved(x, dim, new, axis_data.size) if w_moves or not w else x
        for x, dim, w in zip(args, dims, is_w, strict=True)
    ]
    return p.bind(*args, **params), new


for _primitive in (gather_tangent_p, scatter_tangent_p):
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
