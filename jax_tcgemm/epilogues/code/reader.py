"""Conversion of a jaxpr to an expression graph, with calls inlined."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_tcgemm.epilogues.code import places
from jax_tcgemm.epilogues.code.expressions import EXPRESSIONS
from jax_tcgemm.epilogues.code.places import Places
from jax_tcgemm.epilogues.code.primitives import CALLED, CALLS, EXPANSIONS
from jax_tcgemm.epilogues.code.source import InexpressibleError
from jax_tcgemm.epilogues.code.values import (
    Accumulator,
    Apply,
    Constant,
    Equation,
    Index,
    Keys,
    Member,
    Opaque,
    Operand,
    Reduced,
    Value,
    broadcast,
    keys_of,
    sliced,
    view_of,
)
from jax_tcgemm.system.jax_internals import as_jaxpr


def _is_key(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _has_known_keys(operands: Sequence[Value], avals) -> bool:
    """Return whether all random keys are those of the default generator."""
    keys = [x for x in (*operands, *avals) if _is_key(x)]
    is_known = all(str(x.dtype) == _KEY_DTYPE and not isinstance(x, Opaque) for x in keys)
    return is_known and getattr(jax.config, "jax_threefry_partitionable", True)


# Rules that equations break.
ELEMENTWISE = "be elementwise to be part of a kernel"
_KEY_RULE = "be of JAX's default generator of random numbers to be part of a kernel"
_KEY_DTYPE = "key<fry>"


class Reader:
    """Conversion of one function to values.

    Args:
      num_accumulators: number of arguments that are accumulators.
    """

    def __init__(self, num_accumulators: int):
        self._num_accumulators = num_accumulators
        self._constants: dict[int, Operand] = {}
        # The call and the expanded primitive whose equations are being read.
        self._call: Equation | None = None
        self._expanded = ""

    def read(self, closed: core.ClosedJaxpr) -> list[Value]:
        """Return the results of a function as values.

        Raises:
          InexpressibleError: if the function has effects, which would be lost.
        """
        arguments = []
        for i, var in enumerate(closed.jaxpr.invars):
            aval, number = var.aval, i - self._num_accumulators
            if number < 0:
                arguments.append(Accumulator(aval.shape, aval.dtype, i))
            else:
                arguments.append(self._operand(aval, number))
        return self._inline(closed, arguments)

    def _inline(self, jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Return the results of a jaxpr, closed or not, for given arguments."""
        constants = getattr(jaxpr, "consts", ())
        jaxpr = as_jaxpr(jaxpr)
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, array in zip(jaxpr.constvars, constants, strict=True):
            known[var] = self._constant(array, var.aval)

        def find(atom) -> Value:
            if isinstance(atom, core.Literal):
                return self._constant(atom.val, atom.aval)
            return known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [find(x) for x in eqn.invars])
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [find(x) for x in jaxpr.outvars]

    def _operand(self, aval, number) -> Value:
        if not _is_key(aval):
            return Operand(aval.shape, aval.dtype, number)
        if str(aval.dtype) != _KEY_DTYPE:
            return Opaque(aval.shape, aval.dtype, f"an operand of dtype {aval.dtype}", _KEY_RULE)
        return keys_of(aval, Operand((*aval.shape, 2), np.dtype(np.uint32), number))

    def _constant(self, array, aval) -> Value:
        """Return a literal in the code for a known number, or an operand for an array."""
        if not isinstance(array, jax.Array) and np.ndim(array) == 0:
            return Constant((), aval.dtype, np.asarray(array, aval.dtype)[()])
        if id(array) not in self._constants:
            self._constants[id(array)] = self._operand(aval, array)
        return self._constants[id(array)]

    def _equation(self, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        name, equation = eqn.primitive.name, self._name(eqn)
        avals = [var.aval for var in eqn.outvars]
        if name in CALLS:
            inner = next(eqn.params[key] for key in CALLED if key in eqn.params)
            before, self._call = self._call, equation
            try:
                return self._inline(inner, operands)
            finally:
                self._call = before
        if eqn.effects:
            raise InexpressibleError(str(equation), "have no effects to be part of a kernel")
        if name == "convert_element_type" and isinstance(operands[0], Constant):
            with np.errstate(all="ignore"):
                number = operands[0].number.astype(avals[0].dtype)
            if number.item() == operands[0].number.item():  # exactly, as numbers of Python are
                return [Constant((), number.dtype, number)]
        if name in EXPANSIONS:
            return self._expand(eqn, operands)
        found, rule = None, ELEMENTWISE
        if any(_is_key(x) for x in (*operands, *avals)) and not _has_known_keys(operands, avals):
            rule = _KEY_RULE
        elif name in _READERS:
            found = _READERS[name](self, eqn, *operands)
        elif name in EXPRESSIONS:
            (aval,) = avals
            found = self._apply(
                aval.shape, aval.dtype, equation, name, *operands, params=eqn.params
            )
        if found is None:
            return [Opaque(aval.shape, aval.dtype, equation, rule) for aval in avals]
        return found if isinstance(found, list) else [found]

    def _name(self, eqn) -> Equation:
        return Equation(eqn, self._call)

    def _apply(self, shape, dtype, equation, primitive, *operands, params=None) -> Apply:
        function = (primitive, operands, params or {}, equation, self._expanded)
        return Apply(tuple(shape), np.dtype(dtype), *function)

    def _expand(self, eqn, operands) -> list[Value]:
        """Return the values of a primitive, expanded into other primitives."""
        name = eqn.primitive.name
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        jaxpr = jax.make_jaxpr(functools.partial(EXPANSIONS[name], **eqn.params))(*types)
        before, self._expanded = self._expanded, self._expanded or name
        try:
            return self._inline(jaxpr, operands)
        finally:
            self._expanded = before

    def _same(self, eqn, *operands):
        return list(operands)

    # --- what moves data --------------------------------------------------------------------------

    def _broadcast_in_dim(self, eqn, x, *extents):
        if extents:
            return None
        return broadcast(x, eqn.params["shape"], eqn.params["broadcast_dimensions"])

    def _reshape(self, eqn, x, *extents):
        if extents or eqn.params["dimensions"] is not None:
            return None
        return self._in_order(eqn, x)

    def _in_order(self, eqn, x):
        shape = eqn.outvars[0].aval.shape

        def move(at: Places, result) -> Places:
            return places.reshaped(at, shape, x.shape, result)

        return view_of(x, shape, move, keeps_order=True)

    def _transpose(self, eqn, x):
        permutation = eqn.params["permutation"]

        def move(at: Places, result) -> Places:
            return tuple(at[permutation.index(dim)] for dim in range(len(permutation)))

        return view_of(x, tuple(x.shape[dim] for dim in permutation), move)

    def _slice(self, eqn, x):
        strides = eqn.params["strides"] or (1,) * len(x.shape)
        return sliced(x, eqn.outvars[0].aval.shape, eqn.params["start_indices"], strides)

    def _dynamic_slice(self, eqn, x, *starts):
        if not all(isinstance(start, Constant) for start in starts):
            return None
        sizes = eqn.params["slice_sizes"]
        triples = zip(starts, x.shape, sizes, strict=True)
        starts = [min(max(int(start.number), 0), extent - y) for start, extent, y in triples]
        return sliced(x, sizes, starts, (1,) * len(sizes))

    def _split(self, eqn, x):
        axis, rank = eqn.params["axis"], len(x.shape)
        ends = itertools.accumulate(eqn.params["sizes"], initial=0)
        return [
            sliced(x, var.aval.shape, [start * (dim == axis) for dim in range(rank)], (1,) * rank)
            for var, start in zip(eqn.outvars, ends, strict=False)
        ]

    def _rev(self, eqn, x):
        def move(at: Places, result) -> Places:
            return tuple(
                place.scaled(-1).moved(extent - 1) if dim in eqn.params["dimensions"] else place
                for dim, (place, extent) in enumerate(zip(at, x.shape, strict=True))
            )

        return view_of(x, x.shape, move)

    # --- others -----------------------------------------------------------------------------------

    def _iota(self, eqn, *extents):
        if extents:
            return None
        aval = eqn.outvars[0].aval
        return Index(aval.shape, aval.dtype, (eqn.params["dimension"],))

    def _reduce(self, eqn, x):
        aval, kind = eqn.outvars[0].aval, eqn.primitive.name.removeprefix("reduce_")
        return Reduced(aval.shape, aval.dtype, x, kind, tuple(eqn.params["axes"]), self._name(eqn))

    def _cond(self, eqn, which, *operands):
        """Return selected results of all branches, which have no effects."""
        branches = [self._inline(branch, operands) for branch in eqn.params["branches"]]
        before, self._expanded = self._expanded, self._expanded or "cond"
        results = [
            self._apply(
                value.shape, value.dtype, self._name(eqn), "select_n", which, value, *others
            )
            for value, *others in zip(*branches, strict=True)
        ]
        self._expanded = before
        return None if any(_is_key(x) for x in results) else results

    # --- random numbers of the default generator --------------------------------------------------

    def _threefry(self, shape, equation, *operands) -> tuple[Value, Value]:
        hashed = self._apply(shape, np.uint32, equation, "threefry2x32", *operands)
        return tuple(Member(hashed.shape, hashed.dtype, hashed, number) for number in (0, 1))

    def _hashed_indices(self, eqn, keys: Keys, shape) -> tuple[Value, Value]:
        """Return the hash of each index of `shape` for each key."""
        whole, rank = (*keys.shape, *shape), len(keys.shape)
        words = [broadcast(word, whole, range(rank)) for word in keys.words]
        dimensions = tuple(range(rank, len(whole)))
        counts = [Index(whole, np.dtype(np.uint32), dimensions, shift) for shift in (32, 0)]
        return self._threefry(whole, self._name(eqn), *words, *counts)

    def _threefry2x32(self, eqn, *operands):
        return list(self._threefry(eqn.outvars[0].aval.shape, self._name(eqn), *operands))

    def _random_wrap(self, eqn, data):
        return keys_of(eqn.outvars[0].aval, data)

    def _random_unwrap(self, eqn, keys):
        shape, rank = (*keys.shape, 2), len(keys.shape)
        words = [broadcast(word, shape, range(rank)) for word in keys.words]
        which = Index(shape, np.dtype(np.int32), (rank,))
        return self._apply(shape, np.uint32, self._name(eqn), "select_n", which, *words)

    def _random_seed(self, eqn, seed):
        equation, one = self._name(eqn), (seed.shape, seed.dtype)
        high = seed
        if seed.dtype.itemsize == 8:
            shift = Constant((), seed.dtype, seed.dtype.type(32))
            high = self._apply(*one, equation, "shift_right_logical", seed, shift)
        words = [
            self._apply(seed.shape, np.uint32, equation, "convert_element_type", x)
            for x in (high, seed)
        ]
        if seed.dtype.itemsize < 8:
            words[0] = broadcast(Constant((), np.dtype(np.uint32), np.uint32(0)), seed.shape, ())
        return Keys(seed.shape, eqn.outvars[0].aval.dtype, tuple(words))

    def _random_split(self, eqn, keys):
        aval = eqn.outvars[0].aval
        return Keys(aval.shape, aval.dtype, self._hashed_indices(eqn, keys, eqn.params["shape"]))

    def _random_fold_in(self, eqn, keys, data):
        aval = eqn.outvars[0].aval
        zero = Constant((), np.dtype(np.uint32), np.uint32(0))
        words = self._threefry(aval.shape, self._name(eqn), *keys.words, zero, data)
        return Keys(aval.shape, aval.dtype, words)

    def _random_bits(self, eqn, keys):
        aval, equation = eqn.outvars[0].aval, self._name(eqn)
        high, low = self._hashed_indices(eqn, keys, eqn.params["shape"])
        if eqn.params["bit_width"] == 64:
            high, low = (
                self._apply(aval.shape, np.uint64, equation, "convert_element_type", word)
                for word in (high, low)
            )
            shift = Constant((), aval.dtype, np.uint64(32))
            high = self._apply(aval.shape, np.uint64, equation, "shift_left", high, shift)
            return self._apply(aval.shape, np.uint64, equation, "or", high, low)
        bits = self._apply(aval.shape, np.uint32, equation, "xor", high, low)
        return self._apply(aval.shape, aval.dtype, equation, "convert_element_type", bits)


_READERS = {
    "broadcast_in_dim": Reader._broadcast_in_dim,
    "reshape": Reader._reshape,
    "expand_dims": Reader._in_order,
    "squeeze": Reader._in_order,
    "transpose": Reader._transpose,
    "slice": Reader._slice,
    "dynamic_slice": Reader._dynamic_slice,
    "split": Reader._split,
    "rev": Reader._rev,
    "iota": Reader._iota,
    "reduce_sum": Reader._reduce,
    "reduce_max": Reader._reduce,
    "reduce_min": Reader._reduce,
    "cond": Reader._cond,
    "threefry2x32": Reader._threefry2x32,
    "random_wrap": Reader._random_wrap,
    "random_unwrap": Reader._random_unwrap,
    "random_seed": Reader._random_seed,
    "random_split": Reader._random_split,
    "random_fold_in": Reader._random_fold_in,
    "random_bits": Reader._random_bits,
    **dict.fromkeys(
        (
            "copy",
            "copy_p",
            "name",
            "optimization_barrier",
            "pvary",
            "pcast",
            "reshard",
            "stop_gradient",
        ),
        Reader._same,
    ),
}
