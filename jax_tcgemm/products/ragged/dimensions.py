"""The dimensions of `ragged_dot_general`, and its reduction to the primitive's two forms."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives import ragged_dot as primitive
from jax_tcgemm.products.arguments import ShapeError
from jax_tcgemm.sharding.partitioning import resharded


class Dimensions:
    """The dimensions of a general call by their roles, checked, and its reduction to the primitive.

    The primitive gets `out_sharding` where its result is what is returned, so that a sum over
    devices leaves it so; what is reshaped is divided anew.

    Attributes:
      form: "rows", "contraction" or "batch", by the kind of the ragged dimension.
      x, ragged, y: the dimensions of lhs of the ragged one's kind, before it, itself and after it;
        an index of y is inside a token.
      extent: of the ragged dimension.
    """

    def __init__(self, op, numbers, lhs, rhs, group_sizes, has_offset):
        if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
            raise TypeError(
                f"{op}: ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, "
                f"got {type(numbers).__name__}; see jax.lax.ragged_dot_general"
            )
        self.op = op
        (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch) = (
            numbers.dot_dimension_numbers
        )
        self._check_numbers(numbers, lhs, rhs)
        (ragged,), group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        self.group = group
        self.lhs_free = _rest(lhs.ndim, self.lhs_contract, self.lhs_batch)
        self.rhs_free = _rest(rhs.ndim, self.rhs_contract, self.rhs_batch, group)
        kinds = {
            "rows": self.lhs_free,
            "contraction": self.lhs_contract,
            "batch": self.lhs_batch,
        }
        self.form, own = next((f, dims) for f, dims in kinds.items() if ragged in dims)
        if len(group) != (self.form == "rows"):
            rule = "one group dimension" if self.form == "rows" else "no group dimension"
            self._fail(
                f"rhs must have {rule} where a {self._kind} dimension of lhs is ragged, got "
                f"rhs_group_dimensions={group}; see jax.lax.ragged_dot_general"
            )
        at = own.index(ragged)
        self.x, self.ragged, self.y = own[:at], ragged, own[at + 1 :]
        self.extent = lhs.shape[ragged]
        self.num_sizes = group_sizes.shape[-1]
        self.groups = rhs.shape[group[0]] if group else self.num_sizes
        if not has_offset and self.groups != self.num_sizes:
            self._fail(
                "group_sizes must have as many sizes as rhs has groups, got "
                f"group_sizes.shape={group_sizes.shape} and rhs.shape={rhs.shape}; pass "
                "group_offset where rhs has only some of the groups"
            )
        batch = () if self.form == "batch" else self.lhs_batch
        expected = tuple(lhs.shape[d] for d in (*batch, *self.x))
        if group_sizes.ndim > 1 and group_sizes.shape[:-1] != expected:
            outside = "".join(f"{extent}, " for extent in expected)
            rule = f"(s,) or ({outside}s)" if expected else "(s,)"
            self._fail(
                f"group_sizes must have shape {rule}, got "
                f"group_sizes.shape={group_sizes.shape}; its leading dimensions are those outside "
                "the ragged one"
            )
        self.batch_shape = tuple(lhs.shape[d] for d in self.lhs_batch)
        self.x_shape = tuple(lhs.shape[d] for d in self.x)
        self.y_shape = tuple(lhs.shape[d] for d in self.y)
        self.n_shape = tuple(rhs.shape[d] for d in self.rhs_free)

    @property
    def _kind(self):
        return {"rows": "free", "contraction": "contracted", "batch": "batch"}[self.form]

    def _fail(self, message):
        raise ShapeError(f"{self.op}: {message}")

    def _check_numbers(self, numbers, lhs, rhs):
        if len(numbers.lhs_ragged_dimensions) != 1:
            self._fail(
                "lhs must have exactly one ragged dimension, got "
                f"lhs_ragged_dimensions={numbers.lhs_ragged_dimensions}; name one"
            )
        for name, x, dims in (
            ("lhs", lhs, (*self.lhs_contract, *self.lhs_batch)),
            ("lhs", lhs, numbers.lhs_ragged_dimensions),
            ("rhs", rhs, (*self.rhs_contract, *self.rhs_batch, *numbers.rhs_group_dimensions)),
        ):
            if len(set(dims)) != len(dims) or not all(
                isinstance(d, int | np.integer) and 0 <= d < x.ndim for d in dims
            ):
                self._fail(
                    f"dimensions of {name} must be distinct and in [0, {x.ndim}), got {dims} for "
                    f"{name}.shape={x.shape}; name each at most once, counting from the front"
                )
        for kind, lhs_dims, rhs_dims in (
            ("contracted", self.lhs_contract, self.rhs_contract),
            ("batch", self.lhs_batch, self.rhs_batch),
        ):
            sizes = [lhs.shape[d] for d in lhs_dims], [rhs.shape[d] for d in rhs_dims]
            if sizes[0] != sizes[1]:
                self._fail(
                    f"{kind} dimensions must have equal sizes, got {lhs_dims} of "
                    f"lhs.shape={lhs.shape} and {rhs_dims} of rhs.shape={rhs.shape}; reshape one"
                )

    @property
    def result_ndim(self) -> int:
        """The number of dimensions of the result."""
        own = len(self.lhs_batch) + len(self.lhs_free) + len(self.rhs_free)
        return own + (self.form == "contraction")

    def scaled(self, group_sizes):
        """Sizes with the primitive's batch dimensions, of tokens that include the dimensions y."""
        factor = math.prod(self.y_shape)
        if group_sizes.ndim == 1:
            ones = (1,) * len(self.batch_shape + self.x_shape)
            group_sizes = jnp.reshape(group_sizes, (*ones, self.num_sizes))
        # A size may say more than there is, and must not overflow for that.
        return group_sizes if factor == 1 else jnp.clip(group_sizes, 0, self.extent) * factor

    def _offset(self, offset):
        return jnp.reshape(offset, (1,) * (len(self.batch_shape + self.x_shape) + 1))

    def rows(self, lhs, rhs, sizes, offset, *, out_sharding, **params):
        """The ragged dimension is free: [b, x, m, y, k], [g, b, k, n] -> [b, x, m, y, n]."""
        op_shape = (*self.batch_shape, *self.x_shape)
        ones = (1,) * len(self.x_shape)
        m_shape = (lhs.shape[self.ragged], *self.y_shape)
        k = math.prod(lhs.shape[d] for d in self.lhs_contract)
        lhs = _ordered(lhs, (*self.lhs_batch, *self.lhs_free, *self.lhs_contract))
        lhs = jnp.reshape(lhs, (*op_shape, math.prod(m_shape), k))
        # A group's matrix is read in place either way around.
        k_dims, n_dims = self.rhs_contract, self.rhs_free
        is_transposed = bool(k_dims and n_dims) and min(k_dims) > max(n_dims)
        matrix = (*n_dims, *k_dims) if is_transposed else (*k_dims, *n_dims)
        rhs = _ordered(rhs, (*self.rhs_batch, *self.group, *matrix))
        n = math.prod(self.n_shape)
        extents = (n, k) if is_transposed else (k, n)
        rhs = jnp.reshape(rhs, (*self.batch_shape, *ones, self.groups, *extents))
        is_as_returned = len(m_shape) == len(self.n_shape) == 1
        out = primitive.ragged_dot(
            lhs,
            rhs,
            sizes,
            self._offset(offset),
            form="rows",
            rhs_transposed=is_transposed,
            groups=self.groups,
            out_sharding=out_sharding if is_as_returned else None,
            **params,
        )
        return resharded(jnp.reshape(out, (*op_shape, *m_shape, *self.n_shape)), out_sharding)

    def contraction(self, lhs, rhs, sizes, offset, *, out_sharding, **params):
        """The ragged dimension is contracted: [b, x, k, y, m], [b, x, k, y, n] -> [g, b, m, n]."""
        op_shape = (*self.batch_shape, *self.x_shape)
        tokens = lhs.shape[self.ragged] * math.prod(self.y_shape)
        m_shape = tuple(lhs.shape[d] for d in self.lhs_free)
        lhs = _ordered(lhs, (*self.lhs_batch, *self.lhs_contract, *self.lhs_free))
        rhs = _ordered(rhs, (*self.rhs_batch, *self.rhs_contract, *self.rhs_free))
        is_as_returned = len(m_shape) == len(self.n_shape) == 1 and not op_shape
        out = primitive.ragged_dot(
            jnp.reshape(lhs, (*op_shape, tokens, math.prod(m_shape))),
            jnp.reshape(rhs, (*op_shape, tokens, math.prod(self.n_shape))),
            sizes,
            self._offset(offset),
            form="contraction",
            groups=self.groups,
            out_sharding=out_sharding if is_as_returned else None,
            **params,
        )
        num_batch = len(self.batch_shape)
        if self.x_shape:
            out = jnp.sum(out, tuple(range(num_batch, num_batch + len(self.x_shape))))
        out = jnp.moveaxis(out, num_batch, 0)
        out = jnp.reshape(out, (self.groups, *self.batch_shape, *m_shape, *self.n_shape))
        return resharded(out, out_sharding)


def _rest(ndim: int, *used) -> tuple[int, ...]:
    taken = {d for dims in used for d in dims}
    return tuple(d for d in range(ndim) if d not in taken)


def _ordered(x, dims):
    return x if tuple(dims) == tuple(np.arange(x.ndim)) else lax.transpose(x, dims)
