"""Epilogue of a shard of the accumulator, for products sharded over devices.

A jaxpr has fixed shapes. Its equations determine which dimensions of each array are dimensions of
the accumulator; these take the sizes of the accumulator's shard.
"""

import functools
from collections.abc import Sequence

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.calls import written_out
from jax_tcgemm.epilogues.code.expressions import EXPRESSIONS
from jax_tcgemm.epilogues.code.primitives import EXPANSIONS
from jax_tcgemm.system.jax_internals import bound

# For each dimension of an array, the corresponding dimension of the accumulator, or None.
Dimensions = tuple[int | None, ...]

_ELEMENTWISE = (
    frozenset(EXPRESSIONS) | frozenset(EXPANSIONS) | {"copy", "copy_p", "name", "reshard"}
)
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})


class ShardFunction:
    """Epilogue that is applied to shards of the accumulators.

    Args:
      function: epilogue of accumulators of one shape, and of operands, without constants.
      num_accumulators: number of accumulators, which are sharded alike.

    Attributes:
      operands: for each operand, the accumulator's dimensions to which its dimensions correspond.
        The operand is sharded like the accumulator along these, and whole along the others.
      results: the same for each result.
      whole: the accumulator's dimensions that must not be sharded, because the epilogue reduces
        along them or reads their indices. Sums that are results may be sharded: the result is the
        sum over the shards.
    """

    def __init__(self, function: core.ClosedJaxpr, num_accumulators: int = 1):
        self._function = written_out(function)
        jaxpr = self._function.jaxpr
        self._classes = classes = _Classes()
        summed = _summed(jaxpr)
        for eqn in jaxpr.eqns:
            _relate(eqn, classes, is_result=eqn.outvars[0] in summed)
        (acc, *others), operands = (
            jaxpr.invars[:num_accumulators],
            jaxpr.invars[num_accumulators:],
        )
        for dim in range(len(acc.aval.shape)):
            for other in others:
                classes.unite(other, dim, acc, dim)
        for dim in range(len(acc.aval.shape)):
            classes.name(acc, dim)
        self.operands = tuple(classes.dimensions(x) for x in operands)
        self.results = tuple(classes.dimensions(x) for x in jaxpr.outvars)
        kept = [
            {*dims, *classes.dimensions(summed.get(x, x))}
            for x, dims in zip(jaxpr.outvars, self.results, strict=True)
        ]
        self.whole = frozenset(
            dim
            for dim in range(len(acc.aval.shape))
            if not classes.is_free(acc, dim) or any(dim not in dims for dims in kept)
        )

    def __call__(self, acc: jax.Array, *others: jax.Array) -> list[jax.Array]:
        """Return the shards of the results for shards of the accumulators and operands."""
        jaxpr = self._function.jaxpr
        known = dict(zip(jaxpr.invars, (acc, *others), strict=True))
        known |= zip(jaxpr.constvars, self._function.consts, strict=True)

        def find(atom):
            return atom.val if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            shape = tuple(
                size if dim is None else acc.shape[dim]
                for size, dim in zip(
                    eqn.outvars[0].aval.shape,
                    self._classes.dimensions(eqn.outvars[0]),
                    strict=True,
                )
            )
            results = _of_shard(eqn, shape, *map(find, eqn.invars))
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [find(x) for x in jaxpr.outvars]


@functools.lru_cache(maxsize=1024)
def shard_function(function: core.ClosedJaxpr, num_accumulators: int = 1) -> ShardFunction:
    """Return the cached `ShardFunction` of an epilogue."""
    return ShardFunction(function, num_accumulators)


class _Classes:
    """Sets of dimensions of variables that are sharded together, or not at all."""

    def __init__(self):
        self._parents: dict = {}
        self._whole, self._names = set(), {}

    def _root(self, dimension):
        while (parent := self._parents.get(dimension, dimension)) != dimension:
            dimension = parent
        return dimension

    def unite(self, x, x_dim: int, y, y_dim: int) -> None:
        """Merge the sets of two dimensions of equal size; literals have no sets."""
        if isinstance(x, core.Literal) or isinstance(y, core.Literal):
            return
        root, other = self._root((x, x_dim)), self._root((y, y_dim))
        if root != other:
            self._parents[root] = other
            if root in self._whole:
                self._whole.add(other)

    def keep(self, x, dims: Sequence[int] | None = None) -> None:
        """Mark dimensions, or all dimensions, of a variable as not sharded."""
        if not isinstance(x, core.Literal):
            for dim in range(len(x.aval.shape)) if dims is None else dims:
                self._whole.add(self._root((x, dim)))

    def name(self, acc, dim: int) -> None:
        """Name a set by a dimension of the accumulator; a set with two names is not sharded."""
        root = self._root((acc, dim))
        if self._names.setdefault(root, dim) != dim:
            self._whole.add(root)

    def is_free(self, x, dim: int) -> bool:
        """Return whether a dimension may be sharded."""
        return self._root((x, dim)) not in self._whole

    def dimensions(self, x) -> Dimensions:
        """Return the accumulator's dimensions to which the dimensions of a variable correspond."""
        if isinstance(x, core.Literal):
            return (None,) * len(x.aval.shape)
        return tuple(
            self._names.get(self._root((x, dim))) if self.is_free(x, dim) else None
            for dim in range(len(x.aval.shape))
        )


def _summed(jaxpr: core.Jaxpr) -> dict[core.Var, core.Var]:
    """Return the operand of each `reduce_sum` whose value is a result and nothing else."""
    used = {x for eqn in jaxpr.eqns for x in eqn.invars if not isinstance(x, core.Literal)}
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "reduce_sum" and eqn.outvars[0] not in used
    }


def _relate(eqn: core.JaxprEqn, classes: _Classes, is_result: bool) -> None:
    """Relate the dimensions of an equation's operands and results.

    `is_result` says that the equation is a sum that is a result, so that devices sum the shards.
    """
    name, operands, results, params = eqn.primitive.name, eqn.invars, eqn.outvars, eqn.params
    out, shape = results[0], results[0].aval.shape
    if name in _ELEMENTWISE:
        for x in (*operands, *results[1:]):
            for dim, extent in enumerate(x.aval.shape):
                if extent == shape[dim]:
                    classes.unite(x, dim, out, dim)
    elif name == "broadcast_in_dim" and len(operands) == 1:
        for dim, out_dim in enumerate(params["broadcast_dimensions"]):
            if operands[0].aval.shape[dim] == shape[out_dim]:
                classes.unite(operands[0], dim, out, out_dim)
    elif _is_reshape(eqn):
        _relate_reshape(operands[0], out, classes)
    elif name == "transpose":
        for dim, old in enumerate(params["permutation"]):
            classes.unite(operands[0], old, out, dim)
    elif name == "iota" and not operands:
        classes.keep(out, [params["dimension"]])
    elif name == "slice" and params["strides"] is None:
        for dim, extent in enumerate(operands[0].aval.shape):
            if extent == shape[dim]:
                classes.unite(operands[0], dim, out, dim)
            else:
                classes.keep(operands[0], [dim])
                classes.keep(out, [dim])
    elif name in _ALONG:
        _relate_along(params[_ALONG[name]], name == "stack", operands, results, classes)
    elif name in REDUCTIONS:
        kept = [dim for dim in range(operands[0].aval.ndim) if dim not in params["axes"]]
        if not is_result:
            classes.keep(operands[0], params["axes"])
        for dim, old in enumerate(kept):
            classes.unite(operands[0], old, out, dim)
    else:
        for x in (*operands, *results):
            classes.keep(x)


# Primitives that split or concatenate arrays, and their parameter with the dimension.
_ALONG = {"split": "axis", "concatenate": "dimension", "stack": "axis"}


def _relate_along(axis: int, adds_axis: bool, operands, results, classes: _Classes) -> None:
    """Relate all dimensions but `axis`, along which arrays are split, concatenated or stacked."""
    for x in (*operands, *results):
        is_new = adds_axis and any(x is y for y in results)
        if is_new or not adds_axis:
            classes.keep(x, [axis])
    (out, *_) = results
    for x in (*operands, *results[1:]):
        for dim in range(x.aval.ndim):
            if adds_axis or dim != axis:
                classes.unite(x, dim, out, dim + (adds_axis and dim >= axis))


def _is_reshape(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    is_plain = name == "reshape" and eqn.params["dimensions"] is None
    return is_plain or name in ("squeeze", "expand_dims")


def _relate_reshape(x, out, classes: _Classes) -> None:
    """Relate the dimensions of a reshape that only adds or removes dimensions of size 1."""
    old, new = ([dim for dim, n in enumerate(y.aval.shape) if n != 1] for y in (x, out))
    if [x.aval.shape[dim] for dim in old] != [out.aval.shape[dim] for dim in new]:
        classes.keep(x)
        classes.keep(out)
        return
    for dim, new_dim in zip(old, new, strict=True):
        classes.unite(x, dim, out, new_dim)


def _of_shard(eqn: core.JaxprEqn, shape: tuple[int, ...], *operands) -> list[jax.Array]:
    """Return the results of an equation for shards; `shape` is the shape of the first result."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim" and len(operands) == 1:
        return [lax.broadcast_in_dim(operands[0], shape, params["broadcast_dimensions"])]
    if _is_reshape(eqn):
        return [lax.reshape(operands[0], shape)]
    if name == "reshard":  # The operand is a shard already.
        return [*operands]
    if name == "slice":
        starts = params["start_indices"]
        return [lax.slice(operands[0], starts, [i + n for i, n in zip(starts, shape, strict=True)])]
    if name == "iota" and not operands:
        return [lax.broadcasted_iota(params["dtype"], shape, params["dimension"])]
    # Shards have no mesh in their types.
    params = {key: None if key in _SHARDINGS else value for key, value in params.items()}
    return bound(eqn, params, operands)


_SHARDINGS = ("sharding", "out_sharding")
