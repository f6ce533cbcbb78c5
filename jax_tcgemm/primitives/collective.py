"""Products that overlap with the exchange of their operand or result over a manual mesh axis.

    gather     out = all_gather(x, rows) @ w
    scatter    out = psum_scatter(x @ w, rows)

x (*b, ..., m, k), w (*b, k, n) or, by `How.w_axis`, (*b, n, k). Each is the other's transpose.

Nothing is waited for before something is computed. To gather, a device multiplies its own shard
while the others' are on their way; to scatter, it multiplies the others' rows first and its own
last, while the products travel. Shards go straight from their owner to each other device, not
around a ring: on NVSwitch every pair has the full bandwidth, no transfer waits for another, and a
sum of products is rounded once, not once a hop.

XLA may start each transfer as soon as its operand exists and has to wait for it only where its
result is used. All is made of `lax.ppermute` and our products, so that it runs wherever they do.

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
from jax.interpreters import ad, batching

from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.primitives.backward import define_linear
from jax_tcgemm.primitives.fused_dot_general import moved


@dataclasses.dataclass(frozen=True)
class How:
    """What a call says beside its arrays.

    Attributes:
      axis_name: the mesh axis, or several.
      chunks: pieces in which a shard is moved and multiplied.
      w_axis: the contracted one of w's last two dimensions: 0, or 1 where w is transposed.
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

    def product(self, lhs, rhs, contract, num_batch, dtype=None):
        """The product over `contract`, a pair of tuples of axes; batch dimensions come first."""
        batch = tuple(range(num_batch))
        return primitive.dot_general(
            lhs,
            rhs,
            dimension_numbers=(contract, (batch, batch)),
            precision=self.precision,
            preferred_element_type=dtype or self.dtype,
            implementation=self.implementation,
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

    def moved(self, x, shift: int):
        """Device i's `x` on device i + shift."""
        size = lax.axis_size(self.axis_name)
        pairs = [(source, (source + shift) % size) for source in range(size)]
        return lax.ppermute(x, self.axis_name, pairs)

    def split(self, x):
        """The rows of x in equal pieces."""
        return [x] if self.chunks == 1 else jnp.split(x, self.chunks, x.ndim - 2)


# --- gather, then multiply ----------------------------------------------------------------------


def _shards(how: How, x):
    """Every device's x in pieces, by distance: that of device i + shift. All set out at once."""
    size = lax.axis_size(how.axis_name)
    others = [[how.moved(chunk, -shift) for chunk in how.split(x)] for shift in range(1, size)]
    return [[x], *others]


def _by_device(how: How, shards):
    """Shards, listed by distance from this device, as one array in the order of the devices."""
    if len(shards) == 1:
        return shards[0][0]
    rows = shards[0][0].shape[-2]
    # Twice around, so that any device's turn is a slice: one pass over memory when XLA fuses it.
    around = [chunk for shard in shards + shards[:-1] for chunk in shard]
    first = (len(shards) - lax.axis_index(how.axis_name)) % len(shards)
    around = lax.concatenate(around, around[0].ndim - 2)
    return lax.dynamic_slice_in_dim(around, first * rows, len(shards) * rows, around.ndim - 2)


def _gather(how: How, x, w):
    """all_gather(x) @ w, and all_gather(x)."""
    shards = _shards(how, x)
    products = [[how.times_w(chunk, w) for chunk in shard] for shard in shards]
    return _by_device(how, products), _by_device(how, shards)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def gather_product(how: How, x, w) -> jax.Array:
    """all_gather(x) @ w; arguments are checked, and vary over the axis."""
    return _gather(how, x, w)[0]


def _gather_jvp(how, primals, tangents):
    x, w = primals
    dx, dw = map(_instantiated, tangents)
    out, gathered = _gather(how, x, w)
    parts = []
    if dx is not None:
        parts.append(gather_tangent_p.bind(dx, w, how=how))
    if dw is not None:
        parts.append(how.times_w(gathered, dw))
    return out, functools.reduce(lax.add, parts) if parts else jnp.zeros_like(out)


gather_product.defjvp(_gather_jvp, symbolic_zeros=True)


# --- multiply, then scatter ---------------------------------------------------------------------


def _scatter(how: How, *pairs):
    """psum_scatter of the sum of x @ w over `pairs` of x and w."""
    size, index = lax.axis_size(how.axis_name), lax.axis_index(how.axis_name)

    def product(*xs):
        products = [how.times_w(x, w) for x, (_, w) in zip(xs, pairs, strict=True)]
        return functools.reduce(lax.add, products)

    xs = [x for x, _ in pairs]
    if size == 1:
        return product(*xs)
    row_axis = xs[0].ndim - 2
    rows = xs[0].shape[row_axis] // size

    def shards(owner):
        return [lax.dynamic_slice_in_dim(x, owner * rows, rows, row_axis) for x in xs]

    addends = []
    for shift in range(1, size):
        chunks = zip(*map(how.split, shards((index + shift) % size)), strict=True)
        products = [product(*chunk) for chunk in chunks]
        addends.append([how.moved(part, shift) for part in products])
    own = product(*shards(index))
    is_narrow = jnp.issubdtype(own.dtype, jnp.floating) and own.dtype.itemsize < 4
    wide = jnp.float32 if is_narrow else own.dtype
    total = own.astype(wide)
    for chunks in addends:
        total += lax.concatenate(chunks, row_axis).astype(wide)
    return total.astype(how.dtype)


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
        bars, gathered = [], _by_device(how, _shards(how, ct))
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
